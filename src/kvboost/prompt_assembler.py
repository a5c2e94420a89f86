"""From matches to KV in place: the public path of `kvboost.reuse.assembler`."""

from kvboost.choices import AssemblyMode
from kvboost.models import AssembledPrompt
from kvboost.reuse.assembler import PromptAssembler

__all__ = ["AssembledPrompt", "AssemblyMode", "PromptAssembler"]
