"""Load the frozen target and read its hidden features without running its head.

Legend: B rows, T token slots, F features (captured layers times width), D width.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from dflash_core.errors import TargetError
from dflash_core.target.check import check_target
from dflash_core.target.config import TargetConfig
from dflash_core.target.layers import resolve_layer_ids
from dflash_core.target.rope import freeze_rope

__all__ = ["Target", "load_target", "target_digest"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Target:
    """A frozen causal language model whose decoder layers can be listened to.

    Attributes:
        model: The transformers model, in evaluation mode, without gradients.
        tokenizer: Its tokenizer.
        layer_ids: Decoder layers that feed the drafter, in order.

    Raises:
        TargetError: Its RoPE depends on the longest position of a call and cannot be held.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerFast, layer_ids: tuple[int, ...]
    ) -> None:
        freeze_rope(model)
        self.model = model
        self.tokenizer = tokenizer
        self.layer_ids = layer_ids

    @property
    def input_embeddings(self) -> Any:
        """The embedding module."""
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> Any:
        """The head module."""
        return self.model.get_output_embeddings()

    @property
    def decoder(self) -> Any:
        """The model without its head."""
        return self.model.get_decoder()

    @property
    def hidden_size(self) -> int:
        """Width of the model."""
        return self.input_embeddings.weight.shape[1]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.decoder.layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.input_embeddings.weight.shape[0]

    def drop_layers(self) -> None:
        """Free the decoder layers: embedding, final norm and head are left."""
        self.decoder.layers = nn.ModuleList()

    @torch.no_grad()
    def features(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        *,
        final_hidden: bool = False,
    ) -> Tensor:
        """Return the outputs of the captured layers side by side, shape (B, T, F).

        Layers above the last captured one are not run, nor is the head.

        Args:
            input_ids_BT: Token ids, right-padded.
            attention_mask_BT: True on real tokens; all when not given.
            position_ids_BT: Positions; counted from 0 in each row when not given. Without a mask,
                a position that begins anew ends a document: tokens see their own document only.
            final_hidden: Run all layers and put what the head reads behind, D more columns.
        """
        found: list[Tensor] = []
        with self._listening(whole=final_hidden) as heard, suppress(_Heard):
            output = self.decoder(
                input_ids=input_ids_BT,
                attention_mask=None if attention_mask_BT is None else attention_mask_BT.long(),
                position_ids=position_ids_BT,
                use_cache=False,
            )
            found.append(output.last_hidden_state)
        return torch.cat([*(heard[layer] for layer in self.layer_ids), *found], dim=-1)

    @contextmanager
    def _listening(self, *, whole: bool) -> Iterator[dict[int, Tensor]]:
        heard: dict[int, Tensor] = {}
        last = max(self.layer_ids)

        def listen(layer: int) -> Any:
            def hook(module: nn.Module, arguments: Any, output: Any) -> None:
                heard[layer] = output[0] if isinstance(output, tuple) else output
                if layer == last and not whole:
                    raise _Heard

            return hook

        handles = [
            self.decoder.layers[layer].register_forward_hook(listen(layer))
            for layer in self.layer_ids
        ]
        try:
            yield heard
        finally:
            for handle in handles:
                handle.remove()


class _Heard(Exception):
    pass


def load_target(
    config: TargetConfig,
    *,
    device: torch.device | str = "cpu",
    layers: bool = True,
    checked: bool = True,
) -> Target:
    """Load a transformers folder as a frozen target.

    Args:
        config: Where it is and how it runs.
        device: Where its weights go.
        layers: Whether the decoder layers are kept; a drafter rank needs only embedding, final
            norm and head.
        checked: Whether a few tokens are run, where there are layers, to see that features and
            logits are those that a drafter is made for (`check_target`).

    Raises:
        TargetError: The folder is no causal language model with a fast tokenizer, its layers do
            not fit ``target.layer_ids``, what its weights are quantised by is not installed, or no
            drafter can be made for what it computes.
    """
    trust = config.trust_remote_code
    method = _check_folder(config.path, trust_remote_code=trust)
    # Quantised layers are made where they run: most cannot be moved.
    placed: dict[str, Any] = {"device_map": {"": device}} if method else {}
    with _told_in_one_sentence(config.path, quantised_by=method):
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=trust)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=DTYPES[config.dtype],
            attn_implementation=config.attn_implementation,
            trust_remote_code=trust,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            **placed,
        )
    model, found = loaded
    if found["mismatched_keys"]:
        name, stored, expected = min(found["mismatched_keys"])
        raise TargetError(
            f"{config.path} holds {name} in shape {tuple(stored)} but its config.json says "
            f"{tuple(expected)}; set target.path to a folder whose weights and config.json belong "
            "together"
        )
    if found["missing_keys"]:  # filled at random, with no more than a warning
        missing = sorted(found["missing_keys"])
        raise TargetError(
            f"{config.path} lacks {len(missing)} of the target's weights, {missing[0]} among them; "
            "set target.path to a folder with all of them"
        )
    model = model.eval().requires_grad_(False)
    if not hasattr(model.get_decoder(), "layers"):
        raise TargetError(
            f"{config.path} is a {type(model).__name__} without decoder layers to listen to; set "
            "target.path to a decoder-only language model"
        )
    num_layers = len(model.get_decoder().layers)
    layer_ids = resolve_layer_ids(num_layers, config.num_features, config.layer_ids)
    target = Target(model, tokenizer, layer_ids)
    if not layers:
        target.drop_layers()
    if not method:
        model.to(device)
    if layers and checked:
        check_target(target)
    return target


@contextmanager
def _told_in_one_sentence(path: Path, *, quantised_by: str | None) -> Iterator[None]:
    try:
        yield
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
        RuntimeError,
        SafetensorError,
        StrictDataclassError,
    ) as error:
        first, *more = (str(error).strip() or type(error).__name__).splitlines()
        if more and first.endswith(":"):
            first = f"{first} {more[0].strip()}"
        if re.search(r"attention implementation|attn_implementation|FlashAttention", first):
            raise TargetError(
                f"{path} has no such attention: {first.split('. ')[0].rstrip('.')}; set "
                "target.attention to 'auto'"
            ) from None
        remedy = "set target.path to a transformers folder of a causal language model"
        if quantised_by:
            remedy = (
                f"install what '{quantised_by}' needs, or set target.path to the model's weights "
                "as they were before quantisation"
            )
        raise TargetError(
            f"{path} cannot be loaded as a target model: {first.rstrip('.')}; {remedy}"
        ) from None


def target_digest(path: Path) -> str:
    """Return a hash of a target folder's config, weights, tokenizer and code.

    Raises:
        TargetError: The folder is no transformers folder.
    """
    _check_folder(path, trust_remote_code=True)  # it runs none
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix in {".json", ".safetensors", ".jinja", ".py"}:
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _check_folder(path: Path, *, trust_remote_code: bool) -> str | None:
    """Refuse what is no model folder, and return what its weights are quantised by."""
    if not path.is_dir():
        raise TargetError(f"there is no target folder {path}; set target.path to an existing one")
    file = path / "config.json"
    if not file.is_file():
        raise TargetError(
            f"{path} is no target model: it has no config.json; set target.path to a "
            "transformers folder"
        )
    try:
        raw = json.loads(file.read_bytes())
        if not isinstance(raw, dict) or "model_type" not in raw:
            raise ValueError("it names no model_type")
        if "auto_map" not in raw:
            AutoConfig.for_model(raw["model_type"])
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        raise TargetError(
            f"{file} describes no model that can be loaded ({first}); set target.path to a "
            "transformers folder of a causal language model"
        ) from None
    if "auto_map" in raw and raw["model_type"] not in CONFIG_MAPPING and not trust_remote_code:
        raise TargetError(
            f"{path} is a '{raw['model_type']}', which comes with Python code of its own; set "
            "target.trust_remote_code to true if you trust it"
        )
    quantised = raw.get("quantization_config")
    if not quantised:
        return None
    method = str(quantised.get("quant_method", "bitsandbytes"))
    if method != "bitsandbytes" and method not in AUTO_QUANTIZER_MAPPING:
        # transformers would warn, and read the quantised weights as if they were plain ones.
        raise TargetError(
            f"{path} is quantised by '{method}', which transformers {transformers.__version__} "
            "does not load; set target.path to the model's weights as they were before"
        )
    return method
