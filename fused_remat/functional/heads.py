"""What `multi_head_attention` asks of the shapes of its operands."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fused_remat.functional.operands import Operands

ADAPTERS = ("q_adapter", "k_adapter", "v_adapter", "out_adapter")


@dataclass(frozen=True)
class Sizes:
    """The dims that the operands agree on."""

    batch: int
    length_q: int
    length_k: int
    width: int  # E
    value_width: int  # Ev


def check_shapes(
    operands: Operands,
    weights: dict[str, Tensor],
    biases: dict[str, Tensor | None],
    num_heads: int,
    num_kv_heads: int,
) -> Sizes:
    """The sizes, once every operand but the masks has the shape that the others ask of it."""
    query, key, value = _check_inputs(operands)
    out_proj_weight = operands["out_proj_weight"]
    _check_weight_ranks(out_proj_weight, weights)
    if out_proj_weight.shape[1] % num_heads:
        raise ValueError(f"out_proj_weight must be [Do, H Ev] with H={num_heads}, got {list(out_proj_weight.shape)}")
    value_width = out_proj_weight.shape[1] // num_heads
    rows_v = num_kv_heads * value_width
    if len(weights) == 1:
        rows = weights[""].shape[0] - rows_v
        width, rest = divmod(max(rows, 0), num_heads + num_kv_heads)
        inputs = {"": query}
        for name, x in (("key", key), ("value", value)):
            if x.shape[-1] != query.shape[-1]:
                raise ValueError(
                    f"{name} has {x.shape[-1]} features and query {query.shape[-1]}, which one packed in_proj_weight "
                    "cannot project; pass a tuple of three weights"
                )
    else:
        w_q = weights["[0]"]
        width, rest = (w_q.shape[1], 0) if w_q.dim() == 3 else divmod(w_q.shape[0], num_heads)
        inputs = {"[0]": query, "[1]": key, "[2]": value}
    if width < 1 or rest:
        raise ValueError(
            f"in_proj_weight must have H E rows for q, Hk E for k and Hk Ev for v, with H={num_heads}, "
            f"Hk={num_kv_heads} and Ev={value_width} (columns of out_proj_weight / H); got "
            f"{', '.join(str(list(w.shape)) for w in weights.values())}"
        )
    parts = ((num_heads, width), (num_kv_heads, width), (num_kv_heads, value_width))
    part_rows = [heads * part_width for heads, part_width in parts]
    expected = {
        f"in_proj_weight{part}": (*_rows(part, parts, by_heads=weights[part].dim() == 3), x.shape[-1])
        for part, x in inputs.items()
    }
    expected |= {
        f"in_proj_bias{part}": _rows(part, parts, by_heads=b is not None and b.dim() == 2) for part, b in biases.items()
    }
    expected |= {
        "out_proj_bias": (out_proj_weight.shape[0],), "bias_k": (part_rows[1],), "bias_v": (part_rows[2],),
        "norm.weight": (query.shape[-1],), "norm.bias": (query.shape[-1],), "q_norm": (width,), "k_norm": (width,),
    }  # fmt: skip
    for name, shape in expected.items():
        if operands[name] is not None and tuple(operands[name].shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(operands[name].shape)}")
    features = [*zip((query.shape[-1], key.shape[-1], value.shape[-1]), part_rows, strict=True)]
    _check_factor_shapes(operands, [*features, tuple(reversed(out_proj_weight.shape))])
    if (operands["bias_k"] is None) != (operands["bias_v"] is None):
        raise ValueError("bias_k and bias_v go together; pass both or neither")
    sizes = Sizes(query.shape[0], query.shape[1], key.shape[1], width, value_width)
    _check_rotary_shapes(operands, sizes)
    return sizes


def _check_inputs(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    query = operands["query"]
    key = query if operands["key"] is None else operands["key"]
    value = key if operands["value"] is None else operands["value"]
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(f"{name} must be [B, length, features] with 3 dims, got {list(x.shape)}")
    if key.shape[0] != query.shape[0] or value.shape[:2] != key.shape[:2]:
        raise ValueError(
            "query, key and value must share the batch size, and key and value the length; got "
            f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    return query, key, value


def _check_weight_ranks(out_proj_weight: Tensor, weights: dict[str, Tensor]) -> None:
    named = {"out_proj_weight": out_proj_weight} | {f"in_proj_weight{part}": w for part, w in weights.items()}
    for name, weight in named.items():
        by_heads = name.endswith("]")
        if weight.dim() != 2 and not (by_heads and weight.dim() == 3):
            also = ", or [heads, width, in] with 3" if by_heads else ""
            raise ValueError(f"{name} must be [out, in] with 2 dims{also}; got {list(weight.shape)}")


def _check_factor_shapes(operands: Operands, features: list[tuple[int, int]]) -> None:
    """`features`: (in, out) of each adapter."""
    for name, (d_in, d_out) in zip(ADAPTERS, features, strict=True):
        a, b = operands[f"{name}.a"], operands[f"{name}.b"]
        if a is None:
            continue
        fits = a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1] >= 1
        if not fits or a.shape[1] != d_in or b.shape[0] != d_out:
            raise ValueError(
                f"{name}.a must be [r, {d_in}] and {name}.b [{d_out}, r] with a rank r of at least 1, got "
                f"{list(a.shape)} and {list(b.shape)}"
            )


def _rows(part: str, parts: tuple[tuple[int, int], ...], *, by_heads: bool) -> tuple[int, ...]:
    """The leading dims of a weight, or the shape of a bias; `parts`: heads and width of q, k and v."""
    if part == "":
        return (sum(heads * width for heads, width in parts),)
    heads, width = parts[int(part[1])]
    return (heads, width) if by_heads else (heads * width,)


def _check_rotary_shapes(operands: Operands, sizes: Sizes) -> None:
    cos, sin = operands["rotary[0]"], operands["rotary[1]"]
    if cos is None:
        return
    if sizes.length_q != sizes.length_k:
        raise ValueError(
            f"rotary turns q and k by the same angles, so their lengths must be equal, got {sizes.length_q} and "
            f"{sizes.length_k}"
        )
    for name, t in (("rotary[0] (cos)", cos), ("rotary[1] (sin)", sin)):
        fits = t.dim() in (2, 3) and t.shape[-2] == sizes.length_q and t.shape[-1] % 2 == 0
        if not fits or t.shape[-1] > sizes.width or (t.dim() == 3 and t.shape[0] not in (1, sizes.batch)):
            raise ValueError(
                f"{name} must be [L, R] or [1 or B, L, R] with L={sizes.length_q}, B={sizes.batch} and an even R of "
                f"at most E={sizes.width}, got {list(t.shape)}"
            )
    if cos.shape != sin.shape:
        raise ValueError(f"cos and sin must have one shape, got {list(cos.shape)} and {list(sin.shape)}")
