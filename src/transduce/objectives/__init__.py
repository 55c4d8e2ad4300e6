"""Training objectives and their registry."""

from transduce.contracts import Loss, Objective
from transduce.objectives.attention_penalty import AttentionPenalty
from transduce.objectives.contrastive import Contrastive
from transduce.objectives.cross_entropy import CrossEntropy, RDrop, ScheduledSampling
from transduce.objectives.ctc import Ctc, JointCtc, path_cost
from transduce.objectives.distillation import Distillation
from transduce.objectives.guided_alignment import GuidedAlignment
from transduce.objectives.minimum_risk import MinimumRisk
from transduce.objectives.prefix_lm import WholeStream
from transduce.objectives.reinforce import Reinforce
from transduce.objectives.tbptt import Truncated

__all__ = [
    "OBJECTIVES",
    "AttentionPenalty",
    "Contrastive",
    "CrossEntropy",
    "Ctc",
    "Distillation",
    "GuidedAlignment",
    "JointCtc",
    "Loss",
    "MinimumRisk",
    "Objective",
    "RDrop",
    "Reinforce",
    "ScheduledSampling",
    "Truncated",
    "WholeStream",
    "path_cost",
]

OBJECTIVES: dict[str, type[Objective]] = {
    "cross_entropy": CrossEntropy,
    "tbptt": Truncated,
    "prefix_lm": WholeStream,
    "r_drop": RDrop,
    "scheduled_sampling": ScheduledSampling,
    "distillation": Distillation,
    "minimum_risk": MinimumRisk,
    "guided_alignment": GuidedAlignment,
    "attention_penalty": AttentionPenalty,
    "reinforce": Reinforce,
    "contrastive": Contrastive,
    "ctc": Ctc,
    "joint_ctc": JointCtc,
}
