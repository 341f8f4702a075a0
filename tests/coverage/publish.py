"""What the repository keeps of a sweep: its results, the package's table and a page."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.coverage.causes import causes_of

from locater.models.recipes import Known

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "coverage.json"
TABLE = ROOT / "src" / "locater" / "models" / "coverage.json"
DEFAULTS = TABLE.with_name("defaults.json")
PAGE = ROOT / "docs" / "coverage.md"
README = ROOT / "README.md"
COUNT = r"\d+ of \d+ model types"
KEPT = ("model_type", "architecture", "status", "gap", "file_gap", "attentions", "counts",
        "is_named", "missing")  # fmt: skip
ORDER = ("verified", "skipped", "partly", "missed", "wrong")
"""From the best to the worst that may come out for a class of a model type."""
UNTESTED = {
    "cannot build": "no tiny model of this type was put to the test",
    "no softmax attention": "it has no softmax attention",
}

Records = Mapping[str, Mapping[str, Any]]


def publish(records: Records) -> None:
    """Write all three."""
    version = max(one["transformers"] for one in records.values() if one.get("transformers"))
    kept = {
        name: {key: _rounded(one[key]) for key in KEPT if one.get(key)}
        for name, one in sorted(records.items())
    }
    RESULTS.write_text(_lines({"transformers": [version]}, "families", kept))
    rows = {key: {k: v for k, v in one.items() if v} for key, one in config_defaults().items()}
    DEFAULTS.write_text(
        "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items()) + "\n}\n"
    )
    TABLE.write_text(_lines({"transformers": version}, "types", types(records)))
    table = json.loads(TABLE.read_text())
    PAGE.write_text(page(known_of(table)))
    README.write_text(re.sub(COUNT, counted(known_of(table)), README.read_text()))


def known_of(table: Mapping[str, Any]) -> list[Known]:
    """The table's records."""
    version = table["transformers"]
    return [
        Known(name, one["status"], one.get("gap"), tuple(one.get("missing", ())), version)
        for name, one in table["types"].items()
    ]


def types(records: Records) -> dict[str, dict[str, Any]]:
    """One line per model type: the worst that came out for its classes and settings."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in records.values():
        groups.setdefault(one.get("model_type") or one["family"].partition(" as ")[0], []).append(
            one
        )
    return {name: _type(groups[name]) for name in sorted(groups)}


def _type(group: list[Mapping[str, Any]]) -> dict[str, Any]:
    tested = [one for one in group if one["status"] in ORDER]
    if not tested:
        return {"status": None, "missing": [UNTESTED[group[0]["status"]]]}
    statuses = {one["status"] for one in tested}
    status = max(statuses, key=ORDER.index)
    status = {"missed": "wrong"}.get(status, status)
    if status == "skipped" and len(statuses) > 1:
        status = "partly"
    gaps = [one[key] for one in tested for key in ("gap", "file_gap") if one.get(key) is not None]
    result = {"status": status}
    if gaps:
        result["gap"] = _rounded(max(gaps))
    missing = dict.fromkeys(cause for one in tested for cause in causes_of(one))
    if missing and status != "verified":
        result["missing"] = list(missing)
    return result


def _rounded(value: Any) -> Any:
    """Numbers to two digits, infinite ones as none: JSON has no others."""
    if isinstance(value, list):
        return [one[:160] for one in value[:4]]
    if isinstance(value, float):
        return float(f"{value:.2g}") if math.isfinite(value) else None
    return value


def _lines(head: Mapping[str, Any], name: str, rows: Mapping[str, Any]) -> str:
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in rows.items())
    return f'{json.dumps(head)[:-1]},\n "{name}": {{\n{lines}\n}}}}\n'


def counted(types: Iterable[Known]) -> str:
    """How many of the types with softmax attention are verified."""
    statuses = [one.status for one in types if one.status is not None]
    return f"{statuses.count('verified')} of {len(statuses)} model types"


def page(types: Iterable[Known]) -> str:
    """A table that a user searches for their model."""
    tested = [one for one in types if one.status is not None]
    counts = Counter(one.status for one in tested)
    share = counts["verified"] / max(len(tested), 1)
    version = tested[0].transformers if tested else ""
    head = f"""# Which models are read rightly

Of {len(tested)} model types with softmax attention in transformers {version},
**{counts["verified"]} ({share:.0%}) are verified**; {counts["partly"]} in part, {counts["wrong"]}
have a known gap, {counts["skipped"]} are not read.

Every type is shrunk to a tiny model with random weights and run; the logits of each attention's
form, from the live model and from the file that it saves, are held against what enters the model's
own softmax, up to a constant per row. *Verified* means: all of them agree, the audit, LocAteR and
Probe work on it, and forms that are wrong on purpose do not fit. Gains of a norm before attention
are verified with it: they are what that norm, in the running model, does to each dimension of what
queries and keys read; elsewhere no norm is taken to be known. The gap is the largest difference in
standard deviations of the logits. `python -m tests.coverage.sweep` makes it again (about 20
minutes); this page is written by its `--publish`.

| model type | status | gap | what is missing |
|---|---|---|---|
"""
    rows = [
        f"| {one.model_type} | {_status(one)} | {'' if one.gap is None else f'{one.gap:.0e}'} | "
        f"{'; '.join(one.missing)} |"
        for one in tested
    ]
    return head + "\n".join(rows) + "\n"


def _status(one: Known) -> str:
    return {"wrong": "known gap", "skipped": "not read"}.get(str(one.status), str(one.status))


_SETTINGS = re.compile(
    r"(?!linear_|mamba_|index_|guided_|pred_|prediction_|prompt_|mit_|v_head)"
    r"(\w*(attention_heads|num_heads|n_heads?|key_value_heads|kv_heads|head_dim|head_size)"
    r"|n_head_kv|d_kv|\w*(rope|rotary|rms_norm_eps|layer_norm_eps|norm_eps|sliding_window)\w*"
    r"|\w*qk_?(layer)?norm\w*|layer_types|attention_chunk_size|attention_multiplier"
    r"|query_pre_attn_scalar|key_multiplier|qk_scale_factor|attn_logit_softcapping|multi_query"
    r"|alibi|new_decoder_architecture|position_embedding_type|relative_attention\w*|pos_att_type"
    r"|(kv|q)_lora_rank|mla_scale\w*|num_kv_shared_layers|scale_attn\w*|local_attention"
    r"|global_attn_every_n_layers|clip_qkv|partial_rotary_factor|attention_window_size)"
)


def config_defaults() -> dict[str, dict[str, Any]]:
    """What transformers' configs assume: attention's settings, other spellings, types of parts."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found: dict[str, dict[str, Any]] = {}
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        try:
            config = transformers.CONFIG_MAPPING[model_type]()
        except Exception:  # noqa: BLE001  # some have no defaults
            continue
        found[model_type] = _of_config(config)
    return {name: one for name, one in found.items() if any(one.values())}


def _of_config(config: Any) -> dict[str, Any]:
    import transformers

    said = {key: _pattern(value) for key, value in config.to_dict().items() if value is not None}
    spelled = getattr(type(config), "attribute_map", None) or {}
    heads, width = (
        said.get(spelled.get(key, key)) for key in ("num_attention_heads", "hidden_size")
    )
    if said.get("num_key_value_heads") == heads:
        said.pop("num_key_value_heads", None)  # follows from the others, as head_dim does
    if isinstance(heads, int) and width == heads * (said.get("head_dim") or 0):
        del said["head_dim"]
    parts = {
        key: value.model_type
        for key, value in vars(config).items()
        if isinstance(value, transformers.PreTrainedConfig)
    }
    return {
        "own": {key: value for key, value in said.items() if _SETTINGS.fullmatch(key)},
        "names": {key: name for key, name in spelled.items() if "head" in key or "kv" in key},
        "parts": parts,
    }


def _pattern(value: Any) -> Any:
    """A long list that repeats, by what repeats."""
    if not isinstance(value, list) or len(value) < 3 or not isinstance(value[0], str):
        return value
    for size in range(1, len(value) // 2 + 1):
        if all(value[place] == value[place % size] for place in range(len(value))):
            return {"every": value[:size]}
    return value
