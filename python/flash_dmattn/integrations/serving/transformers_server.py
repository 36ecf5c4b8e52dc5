"""`python -m flash_dmattn serve MODEL`: the server of transformers, for models that use this package's attention."""

from __future__ import annotations

import transformers
import typer
from transformers import PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager
from transformers.models.doge.modeling_doge import DogeAttention

from ..transformers.compat import HAS_SLOTS_IN_BATCHES
from ..transformers.compat.server import serve_with
from ..transformers.enable import enable_flash_dmattn
from ..transformers.names import NAME, NAMES

if not HAS_SLOTS_IN_BATCHES:
    raise ImportError(f"transformers {transformers.__version__} is installed")


class FlashModelManager(ModelManager):
    """transformers' loader of models, which also takes the names of this package for `--attn-implementation`."""

    def __init__(self, *args, continuous_batching: bool = False, **kwargs):
        self.batches = continuous_batching  # set before a model is loaded
        super().__init__(*args, continuous_batching=continuous_batching, **kwargs)

    def _validate_args(self) -> None:
        name = self.attn_implementation
        if name in NAMES:
            self.attn_implementation = None
        super()._validate_args()
        self.attn_implementation = name

    def _load_model(self, *args, **kwargs) -> PreTrainedModel:
        model = super()._load_model(*args, **kwargs)
        if self.attn_implementation not in NAMES:
            return model
        if any(isinstance(module, DogeAttention) for module in model.modules()):
            return enable_flash_dmattn(model, cache="dynamic_mask")
        if self.batches:
            raise ValueError(
                f"--continuous-batching: got it for a {type(model).__name__}, expected a Doge, whose sequences have slots; "
                f"{NAME} has no paged cache. Add --no-continuous-batching, or another --attn-implementation"
            )
        return model


def serve(arguments: list[str], program: str) -> None:
    """Runs the server with the options of `transformers serve`.

    By default it uses this package's attention and continuous batching.
    """
    options = list(arguments)
    if not any(option.startswith("--attn-implementation") for option in options):
        options += ["--attn-implementation", NAME]
    if not {"--continuous-batching", "--no-continuous-batching"} & set(options):
        options.append("--continuous-batching")
    app = typer.Typer(add_completion=False)
    app.command()(serve_with(FlashModelManager))
    app(args=options, prog_name=program)
