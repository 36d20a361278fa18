"""`fused_remat.attention` as an attention implementation of Hugging Face transformers.

For those who want the core alone: q, k and v are still the model's own, and nothing else of the model changes.

    from fused_remat.integrations import transformers as integration

    integration.register()
    model.set_attn_implementation("fused_remat")
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.functional import attention

DEFAULT_NAME = "fused_remat"

# transformers recognises its own implementations by these parts of a name and takes other paths for them.
_TAKEN = ("eager", "sdpa", "flash", "flex", "paged")

# What models hand down besides the arguments of `attention_forward` and what does not change the result of attention:
_HARMLESS = frozenset(
    (
        # the mask, which our mask function makes, holds these already
        "sliding_window", "position_ids", "seq_idx", "cache_position",
        # only how other implementations compute it; ours is deterministic always
        "deterministic", "max_length_q", "max_length_k",
        # of the layers around
        "cache", "encoder_hidden_states", "labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
        "output_router_logits", "past_key_value", "past_key_values", "position_embeddings", "return_dict", "use_cache",
    )
)  # fmt: skip


def register(name: str = DEFAULT_NAME, *, ignore: Iterable[str] = ()) -> None:
    """Makes `model.set_attn_implementation(name)` run `fused_remat.attention`; calling it again changes nothing.

    The mask function is registered under the same name. Without one, transformers would hand every attention None in
    the place of its mask.

    Args:
        name: what the implementation is to be called, an identifier without the words that transformers reads as one of
            its own (eager, sdpa, flash, flex, paged).
        ignore: keyword arguments of a model's attention layers that do not change attention. Any that is neither known
            here nor named is refused when it comes, rather than dropped.

    Raises:
        ImportError: transformers is not installed, or too old to have attention and mask interfaces.
        TypeError: `ignore` is not an iterable of strings.
        ValueError: the name cannot be used, or belongs to another implementation.
    """
    _check_name(name)
    ignored = frozenset([] if isinstance(ignore, str) else ignore)
    if isinstance(ignore, str) or not all(isinstance(keyword, str) for keyword in ignored):
        raise TypeError(f"ignore must be an iterable of keyword names, got {ignore!r}; write ignore=('keyword',)")
    attentions, masks = _interfaces()
    for interface in (attentions, masks):
        if name in interface and getattr(interface[name], "func", None) not in (attention_forward, attention_mask):
            raise ValueError(f"name {name!r} is taken by another attention implementation; choose another name")
    attentions.register(name, functools.partial(attention_forward, ignore=ignored))
    masks.register(name, functools.partial(attention_mask, masks["sdpa"]))


def attention_forward(
    module: nn.Module,
    query: Tensor,  # [B, H, Lq, E]
    key: Tensor,  # [B, Hk, Lk, E]
    value: Tensor,  # [B, Hk, Lk, Ev]
    attention_mask: Tensor | None,  # broadcasts to [B, H, Lq, Lk]
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,  # broadcasts to [B, H, Lq, Lk]
    *,
    softcap: float | None = None,
    output_attentions: bool | None = None,
    ignore: frozenset[str] = frozenset(),
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in the place of its own `sdpa_attention_forward`, with the same meaning.

    Args:
        module: the attention layer; its `is_causal` counts where the argument is None, and True where it has none.
        query, key, value: shapes above; grouped key-value heads are not repeated.
        attention_mask: bool, True = take part, or floating, added to the scores. None: causal if the layer is, and all
            keys for one query.
        dropout: probability, 0 in evaluation: layers pass what applies.
        position_bias: added to the scores; its gradient is computed.
        softcap: bounds the scaled scores before masks and bias, as `fused_remat.attention` does.
        ignore: names among `others` that the user declared harmless.

    Returns:
        (out [B, Lq, H, Ev], None): attention weights are never made. A query that may see no key gets zeros.

    Raises:
        ValueError: an argument that would change the result and that `fused_remat.attention` does not have.
    """
    _check_others(others, ignore, masked=attention_mask is not None)
    if output_attentions:
        warnings.warn(
            "output_attentions=True: this attention implementation makes no attention weights, so none are returned; "
            'use model.set_attn_implementation("eager") to get them',
            stacklevel=2,
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # In this order the last operand, a bool, is the result under torch.compile with dynamic lengths too.
    causal = query.shape[2] > 1 and attention_mask is None and causal
    if causal:
        _check_aligned(query, key, others.get("sliding_window"))
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)  # learned queries, shared by the batch
    out = attention(
        query,
        key,
        value,
        attn_mask=_merge(attention_mask, position_bias),
        is_causal=bool(causal),
        dropout_p=dropout,
        scale=scaling,
        softcap=softcap,
    )
    return out.transpose(1, 2).contiguous(), None


def attention_mask(sdpa_mask: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    """The mask that `sdpa_mask` makes, and never None where None would not say which corner "causal" means.

    transformers leaves out a causal mask of Lq queries and Lk > Lq keys where sdpa's corner, the top left one, is right
    for it. Models that drop leading queries need the other corner; so only square masks are left out here.
    """
    length_k = kwargs.get("kv_length")
    length_q = kwargs.get("q_length")
    if length_q is None and "cache_position" in kwargs:
        length_q = kwargs["cache_position"].shape[0]
    if length_q != length_k and length_q != 1:
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier() or any(word in name for word in _TAKEN):
        raise ValueError(
            f"name must be an identifier without any of {', '.join(_TAKEN)}, which transformers reads as its own "
            f"implementations; got {name!r}; leave it out for {DEFAULT_NAME!r}"
        )


def _interfaces() -> tuple[Any, Any]:
    """transformers' registries of attention and mask functions. Raises ImportError where they are not."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"transformers cannot be imported ({error}); install it with: pip install 'transformers>=5.0'"
        ) from error
    try:
        attentions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
        masks["sdpa"], attentions.register, masks.register  # all that is used here
    except (ImportError, AttributeError, KeyError) as error:
        version = getattr(library, "__version__", "of unknown version")
        raise ImportError(
            f"transformers {version} has no attention and mask interfaces to register with ({error!r}); "
            "install a newer one with: pip install -U 'transformers>=5.0'"
        ) from error
    return attentions, masks


def _check_others(others: dict[str, Any], ignore: frozenset[str], *, masked: bool) -> None:
    """Raises ValueError for what would change the result; what is None asks for nothing."""
    for name, value in others.items():
        if value is None or name in _HARMLESS or name in ignore:
            continue
        if name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            # Packed sequences; the mask has their boundaries where there is one, and one sequence has none.
            if masked or value.numel() <= 2:
                continue
            raise ValueError(
                f"{name} packs {value.numel() - 1} sequences, but there is no mask that keeps them apart; pass "
                "position_ids that start anew with each sequence, from which transformers makes one"
            )
        raise ValueError(
            f"{name} is not an argument that this attention implementation has, and dropping it could change the "
            'result; use model.set_attn_implementation("eager"), or if it does not change attention '
            f"fused_remat.integrations.transformers.register(ignore=({name!r},))"
        )


def _check_aligned(query: Tensor, key: Tensor, window: int | None) -> None:
    """Raises ValueError for a causal call without a mask whose meaning only a mask could hold."""
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"causal attention of {query.shape[2]} queries and {key.shape[2]} keys came without a mask, which alone "
            "says which keys each query may see; pass attention_mask, or is_causal=False for all keys"
        )
    if window is not None and window < key.shape[2]:
        raise ValueError(
            f"sliding_window={window} with {key.shape[2]} keys came without a mask, which alone holds the window; "
            "is the mask function of this implementation registered (register() does it)?"
        )


def _merge(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Both in one mask that is added to the scores; a bool mask's False becomes -inf."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return bias + mask
