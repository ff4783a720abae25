"""attnworks: exact, IO-aware attention, and a workbench for those who write attention kernels."""

from attnworks.api import attention, attention_decode, attention_varlen, explain
from attnworks.cache import Rotary
from attnworks.errors import UnsupportedError, Verdict
from attnworks.integrations.sdpa import replace_sdpa, sdpa
from attnworks.masks import Causal, Window
from attnworks.merge import merge
from attnworks.plan import Plan
from attnworks.prepared import use_plans
from attnworks.scores import ALiBi, Bias, Sink, Softcap

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Bias",
    "Causal",
    "Plan",
    "Rotary",
    "Sink",
    "Softcap",
    "UnsupportedError",
    "Verdict",
    "Window",
    "attention",
    "attention_decode",
    "attention_varlen",
    "explain",
    "merge",
    "replace_sdpa",
    "sdpa",
    "use_plans",
]
