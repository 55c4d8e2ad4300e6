"""Hugging Face models: one file per family, import and export together.

`FAMILIES` maps the architecture that config.json names to its family; import and export both walk it.
"""

from transduce.contracts import Family
from transduce.interop.huggingface import (
    bart,
    bert,
    blip,
    encoder_decoder,
    git,
    gpt2,
    llama,
    modernbert,
    moonshine,
    pix2struct,
    speech_to_text,
    t5,
    vit,
    wav2vec2,
    whisper,
)
from transduce.recipe.recipe import load_user_class

# An export takes the first family that fits.
FAMILIES: dict[str, Family] = {
    **bart.FAMILIES,
    **t5.FAMILIES,
    **gpt2.FAMILIES,
    **llama.FAMILIES,
    **bert.FAMILIES,
    **modernbert.FAMILIES,
    **vit.FAMILIES,
    **whisper.FAMILIES,
    **wav2vec2.FAMILIES,
    **speech_to_text.FAMILIES,
    **moonshine.FAMILIES,
    **blip.FAMILIES,
    **git.FAMILIES,
    **pix2struct.FAMILIES,
    **encoder_decoder.FAMILIES,
}

# Architectures that an export writes as a relative, which computes the same and comes before them.
TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
RELATIVES = {
    "PLBartForConditionalGeneration": "BartForConditionalGeneration",
    "MvpForConditionalGeneration": "BartForConditionalGeneration",
    "BlenderbotForConditionalGeneration": "PegasusForConditionalGeneration",
    "FSMTForConditionalGeneration": "MarianMTModel",
    "MT5ForConditionalGeneration": "T5ForConditionalGeneration",
    "OPTForCausalLM": "GPT2LMHeadModel",
    "Qwen2ForCausalLM": "LlamaForCausalLM",
    **{f"{name}{task}": f"Roberta{task}" for name in ("XLMRoberta", "Camembert") for task in TASKS},
    **{
        f"{name}{task}": f"Bert{task}" for name in ("DistilBert", "Electra") for task in TASKS if "Sequence" not in task
    },
}


def exported_as(name: str) -> str:
    """The architecture that an export of this one writes; empty: it is only imported."""
    return RELATIVES.get(name) or (name if FAMILIES[name].to_config is not None else "")


def user_family(name: str) -> Family:
    """A family in a Python file of the user, `file:Class`: a subclass of Family that takes no arguments."""
    family: Family = load_user_class(Family, name, "--family")()
    return family


__all__ = ["FAMILIES", "Family", "exported_as", "user_family"]
