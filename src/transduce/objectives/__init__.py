"""A model and a batch enter; the loss that training makes small leaves."""

from transduce.objectives.alignment import GuidedAlignment
from transduce.objectives.contrastive import Contrastive
from transduce.objectives.ctc import Ctc
from transduce.objectives.distillation import Distillation
from transduce.objectives.objective import Loss, Model, Objective
from transduce.objectives.risk import MinimumRisk
from transduce.objectives.teacher_forcing import CrossEntropy, RDrop, ScheduledSampling

__all__ = [
    "OBJECTIVES",
    "Contrastive",
    "CrossEntropy",
    "Ctc",
    "Distillation",
    "GuidedAlignment",
    "Loss",
    "MinimumRisk",
    "Model",
    "Objective",
    "RDrop",
    "ScheduledSampling",
]

# What a recipe may name. GuidedAlignment waits for data that brings links into a batch; Contrastive and Ctc take
# summaries and frame scores, not a model that speaks tokens.
OBJECTIVES: dict[str, type[Objective]] = {
    "cross_entropy": CrossEntropy,
    "r_drop": RDrop,
    "scheduled_sampling": ScheduledSampling,
    "distillation": Distillation,
    "minimum_risk": MinimumRisk,
}
