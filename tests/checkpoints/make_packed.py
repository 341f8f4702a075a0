"""Make `data/packed/*.safetensors`: one weight packed by each library, and what it unpacks it to.

Run where auto-gptq 0.7, autoawq 0.2, bitsandbytes 0.50, compressed-tensors 0.20 and mlx 0.32 are:

    python tests/checkpoints/make_packed.py

A library that is not installed leaves its files as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

DATA = Path(__file__).with_name("data") / "packed"
ROWS, COLUMNS = 32, 128
Made = dict[str, tuple[dict[str, Tensor], Tensor, dict[str, Any]]]


def weight() -> Tensor:
    """Heavy-tailed, as weights are."""
    normal = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return 0.1 * normal * normal.abs()


def groups(size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros of every group of a row, as a quantizer would choose them."""
    rows = weight().view(ROWS, -1, size)
    low, high = rows.amin(-1), rows.amax(-1)
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, (-low / scale).round().clamp(1, 2**bits - 1)


def gptq() -> Made:
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    made: Made = {}
    for bits, size, ordered in ((4, 64, True), (3, 32, True), (8, 64, True), (4, 32, False)):
        scale, zero = groups(size, bits)
        linear = nn.Linear(COLUMNS, ROWS, bias=False)
        linear.weight.data = weight()
        layer = QuantLinear(bits, size, COLUMNS, ROWS, False)
        index = torch.arange(COLUMNS, dtype=torch.int32) // size
        if not ordered:
            index = index[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
        layer.pack(linear, scale, zero.clone(), index)
        layer.scales = layer.scales.float()
        truth = layer(torch.eye(COLUMNS)).mT
        parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        name = f"gptq-{bits}{'' if ordered else '-by-activation'}"
        made[name] = parts, truth, {"quantization_config": {"quant_method": "gptq", "bits": bits}}
    return made


def awq() -> Made:
    from awq.utils.packing_utils import AWQ_ORDER, dequantize_gemm

    scale, zero = groups(64, 4)
    whole = weight().view(ROWS, -1, 64)
    numbers = (whole / scale[..., None] + zero[..., None]).round().clamp(0, 15).view(ROWS, -1).mT

    def packed(values: Tensor) -> Tensor:
        words = torch.zeros(len(values), ROWS // 8, dtype=torch.int64)
        for place, column in enumerate(AWQ_ORDER):
            words |= values[:, column::8].long() << (4 * place)
        return words.to(torch.int32)

    parts = {"qweight": packed(numbers), "qzeros": packed(zero.mT), "scales": scale.mT.half()}
    truth = dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, 64).mT
    return {"awq": (parts, truth, {"quantization_config": {"quant_method": "awq", "bits": 4}})}


def bitsandbytes() -> Made:
    import bitsandbytes.functional as library

    made: Made = {}
    for kind, nested in (("nf4", True), ("nf4", False), ("fp4", True)):
        packed, state = library.quantize_4bit(
            weight(), quant_type=kind, compress_statistics=nested, blocksize=64
        )
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        truth = library.dequantize_4bit(packed, state)
        made[f"bitsandbytes-{kind}{'' if nested else '-plain'}"] = (
            parts | {"weight": packed},
            truth,
            {},
        )
    packed, scale, _ = library.int8_vectorwise_quant(weight().half())
    truth = library.int8_vectorwise_dequant(packed, scale)
    made["bitsandbytes-int8"] = {"weight": packed, "SCB": scale}, truth, {}
    return made


def compressed_tensors() -> Made:
    from compressed_tensors.compressors.nvfp4.helpers import (
        pack_fp4_to_uint8,
        unpack_fp4_from_uint8,
    )
    from compressed_tensors.compressors.pack_quantized.helpers import (
        pack_to_int32,
        unpack_from_int32,
    )

    made: Made = {}
    for bits, symmetric in ((4, True), (4, False), (8, True)):
        scale, zero = groups(64, bits)
        middle = 2 ** (bits - 1)
        zero = torch.full_like(zero, middle) if symmetric else zero
        whole = weight().view(ROWS, -1, 64) / scale[..., None] + zero[..., None]
        numbers = whole.round().clamp(0, 2**bits - 1).view(ROWS, -1) - middle
        stored = pack_to_int32(numbers.to(torch.int8), bits)
        shape = torch.tensor([ROWS, COLUMNS])
        parts = {"weight_packed": stored, "weight_scale": scale, "weight_shape": shape}
        back = unpack_from_int32(parts["weight_packed"], bits, torch.Size((ROWS, COLUMNS)))
        origin = torch.zeros_like(scale)
        if not symmetric:
            stored = pack_to_int32((zero - middle).to(torch.int8), bits, packed_dim=0)
            parts["weight_zero_point"] = stored.contiguous()
            origin = unpack_from_int32(stored, bits, scale.shape, packed_dim=0).float()
        wide = [part.repeat_interleave(64, 1) for part in (origin, scale)]
        config = {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}}
        made[f"compressed-{bits}{'' if symmetric else '-zeros'}"] = (
            parts, (back.float() - wide[0]) * wide[1], {"quantization_config": config},
        )  # fmt: skip
    points = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    whole = weight().view(ROWS, -1, 16)
    scale = (whole.abs().amax(-1) / 6 * 100).to(torch.float8_e4m3fn)
    share = whole / (scale.float() / 100)[..., None].clamp_min(1e-9)
    nearest = (share.abs()[..., None] - points).abs().argmin(-1)
    values = (points[nearest] * share.sign()).view(ROWS, -1)
    stored = pack_fp4_to_uint8(values)
    back = unpack_fp4_from_uint8(stored, ROWS, COLUMNS, dtype=torch.float32)
    parts = {
        "weight_packed": stored,
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([100.0]),
    }
    made["nvfp4"] = parts, back * (scale.float() / 100).repeat_interleave(16, 1), {}
    return made


def mlx() -> Made:
    import mlx.core as library
    import numpy

    made: Made = {}
    for bits, size in ((4, 64), (8, 32), (3, 64), (6, 64), (2, 32), (5, 64)):
        whole = library.array(weight().numpy())
        parts = library.quantize(whole, group_size=size, bits=bits)
        truth = library.dequantize(*parts, group_size=size, bits=bits)
        stored = [torch.from_numpy(numpy.array(part)) for part in parts]
        names = ("weight", "scales", "biases")
        made[f"mlx-{bits}"] = (
            dict(zip(names, stored, strict=True)), torch.from_numpy(numpy.array(truth)),
            {"quantization": {"bits": bits, "group_size": size}},
        )  # fmt: skip
    return made


LIBRARIES: tuple[Callable[[], Made], ...] = (gptq, awq, bitsandbytes, compressed_tensors, mlx)

if __name__ == "__main__":
    DATA.mkdir(parents=True, exist_ok=True)
    for library in LIBRARIES:
        try:
            made = library()
        except ImportError as error:
            print(f"{library.__name__}: {error}")  # noqa: T201
            continue
        for name, (parts, truth, config) in made.items():
            tensors = {part: tensor.contiguous() for part, tensor in parts.items()}
            told = {"config": json.dumps(config)}
            save_file(
                {**tensors, "expected": truth.float().contiguous()},
                DATA / f"{name}.safetensors",
                told,
            )
            print(name, {part: tuple(tensor.shape) for part, tensor in parts.items()})  # noqa: T201
