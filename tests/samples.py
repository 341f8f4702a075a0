"""The files that the documents' commands speak of: tiny checkpoints, a text, moments."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

WORDS = ("the", "head", "looks", "at", "late", "tokens", "and", "sees", "all", "of", "them", "now")


def write_samples(folder: Path) -> None:
    """Write `model/` and `tuned/`, a tiny Llama before and after, `adapter/`, a text, moments."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate(("[UNK]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM(config)
        for name, scale in (("model", 0.3), ("tuned", 0.1)):
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(scale * noise)
            model.save_pretrained(folder / name)
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(
                folder / name
            )
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # PEFT begins at zero
                parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder / "adapter")
    words = torch.randint(len(WORDS), (2_000,), generator=generator).tolist()
    (folder / "text.txt").write_text(" ".join(WORDS[word] for word in words) + "\n")
    from locater.models.loading import load_model, read_text, text_blocks
    from locater.reality.what_if import moments

    loaded, own = load_model(str(folder / "model"))
    blocks = text_blocks(own, read_text(folder / "text.txt"), tokens=16, blocks=100)
    moments(loaded, blocks, name="model").save(folder / "moments.safetensors")
