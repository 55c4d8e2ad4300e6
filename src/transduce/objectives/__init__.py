"""Training objectives and their registry."""

from transduce.contracts import Loss, Objective
from transduce.objectives.attention_losses import AttentionPenalty, GuidedAlignment, Reinforce
from transduce.objectives.contrastive import Contrastive, CoSENT, CosineRegression
from transduce.objectives.cross_entropy import CrossEntropy, Distillation, RDrop, ScheduledSampling, WaitK
from transduce.objectives.ctc import CTC, JointCTC, ctc_loss
from transduce.objectives.language_modelling import PrefixLM, SkipGram, TruncatedBPTT
from transduce.objectives.sequence_level import Imitation, MinimumRisk

__all__ = [
    "CTC",
    "OBJECTIVES",
    "AttentionPenalty",
    "CoSENT",
    "Contrastive",
    "CosineRegression",
    "CrossEntropy",
    "Distillation",
    "GuidedAlignment",
    "Imitation",
    "JointCTC",
    "Loss",
    "MinimumRisk",
    "Objective",
    "PrefixLM",
    "RDrop",
    "Reinforce",
    "ScheduledSampling",
    "SkipGram",
    "TruncatedBPTT",
    "WaitK",
    "ctc_loss",
]

OBJECTIVES: dict[str, type[Objective]] = {
    "cross_entropy": CrossEntropy,
    "wait_k": WaitK,
    "tbptt": TruncatedBPTT,
    "prefix_lm": PrefixLM,
    "r_drop": RDrop,
    "scheduled_sampling": ScheduledSampling,
    "distillation": Distillation,
    "minimum_risk": MinimumRisk,
    "guided_alignment": GuidedAlignment,
    "attention_penalty": AttentionPenalty,
    "reinforce": Reinforce,
    "contrastive": Contrastive,
    "skip_gram": SkipGram,
    "cosine_regression": CosineRegression,
    "cosent": CoSENT,
    "ctc": CTC,
    "joint_ctc": JointCTC,
    "imitation": Imitation,
}
