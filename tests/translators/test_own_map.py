"""Maps of one's own: what is read, what is refused, packages that are broken, and wrong maps that the check catches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, gguf_names, llama_folder, llama_metadata, llama_tensors, write_gguf, write_hf
from click.testing import CliRunner
from exported import oam_bytes, oam_values, safetensors_bytes
from safetensors.numpy import save_file

import oazoo
from oazoo.cli.main import main
from oazoo.errors import TranslationError, UsageError
from oazoo.translators import convert, plan, supported, translators
from oazoo.translators import own_map as module
from oazoo.translators import translator as registry
from oazoo.translators.exporter import exporters
from oazoo.translators.own_map import OwnMap, load_map
from oazoo.translators.translator import plugin_faults

#: The Llama's own layout as a map: each test bends a part of it.
NAMES = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
CONFIG = """
vocab_size = { from = "vocab_size" }
hidden_size = { from = "hidden_size" }
intermediate_size = { from = "intermediate_size" }
num_layers = { from = "num_hidden_layers" }
num_heads = { from = "num_attention_heads" }
num_kv_heads = { from = "num_key_value_heads" }
head_dim = 8
norm_eps = { from = "rms_norm_eps" }
rope_theta = { from = "rope_theta" }
max_positions = { from = "max_position_embeddings" }
tied_embeddings = false
"""


def rule(target: str, source: str, more: str = "") -> str:
    return f'[[rules]]\ntarget = "{target}"\nsource = "{source}"\n{more}\n'


def toml(
    names: dict[str, str] = NAMES, config: str = CONFIG, rules: str = "", accepts: str = "hf:LlamaForCausalLM"
) -> str:
    text = f'name = "mine"\naccepts = ["{accepts}"]\nfamily = "decoder"\n[config]\n{config}\n'
    text += rule("embed.weight", "model.embed_tokens.weight") + rule("norm.weight", "model.norm.weight")
    text += rule("head.weight", "lm_head.weight") + rules
    for ours, theirs in names.items():
        text += rule(f"layers.{{layer}}.{ours}.weight", f"model.layers.{{layer}}.{theirs}.weight")
    return text


def save(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def command(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {name: value * 4 for name, value in llama_tensors(LLAMA).items()}
    return write_hf(tmp_path / "hf", LLAMA, tensors)


# -- TOML --------------------------------------------------------------------------------------------------------------


def test_a_right_map_is_the_built_in_one(folder: Path, tmp_path: Path) -> None:
    own = load_map(save(tmp_path / "m.toml", toml()))
    assert convert(folder, tmp_path / "own.oam", own=own.translators).translator == "mine"
    convert(folder, tmp_path / "built-in.oam")
    assert oam_bytes(tmp_path / "own.oam") == oam_bytes(tmp_path / "built-in.oam")


@pytest.mark.parametrize(
    "wrong",
    [
        NAMES | {"attn.k": NAMES["attn.v"], "attn.v": NAMES["attn.k"]},
        NAMES | {"mlp.gate": NAMES["mlp.up"], "mlp.up": NAMES["mlp.gate"]},
        NAMES | {"attn_norm": NAMES["mlp_norm"], "mlp_norm": NAMES["attn_norm"]},
    ],
)
def test_wrong_maps_are_caught_by_the_check(wrong: dict[str, str], tmp_path: Path) -> None:
    tensors = {name: value * 4 + (value.ndim == 1) for name, value in llama_tensors(LLAMA).items()}
    folder, own = write_hf(tmp_path / "hf", LLAMA, tensors), save(tmp_path / "m.toml", toml(wrong))
    done = command("convert", folder, "-o", tmp_path / "m.oam", "--map", own, "--check")
    assert done.exit_code == 1 and "check FAILED" in done.stderr and (tmp_path / "m.oam").is_file()
    right = save(tmp_path / "right.toml", toml())
    done = command("convert", folder, "-o", tmp_path / "m.oam", "--map", right, "--check", "--force")
    assert done.exit_code == 0 and "check passed" in done.stderr


def test_rows_of_gguf_that_are_not_put_back_in_order(tmp_path: Path) -> None:
    """The kind of fault that leaves every shape as it is."""
    tensors = {name: value * 4 for name, value in llama_tensors(LLAMA).items()}
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), gguf_names(tensors))
    config = CONFIG
    for theirs, ours in {
        "vocab_size": "llama.vocab_size",
        "hidden_size": "llama.embedding_length",
        "intermediate_size": "llama.feed_forward_length",
        "num_hidden_layers": "llama.block_count",
        "num_attention_heads": "llama.attention.head_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
        "rope_theta": "llama.rope.freq_base",
        "max_position_embeddings": "llama.context_length",
    }.items():
        config = config.replace(f'from = "{theirs}"', f'from = "{ours}"')
    text = toml(config=config, accepts="gguf:llama")
    for old, new in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("_proj", ""),
    ):
        text = text.replace(f'source = "{old}', f'source = "{new}').replace(
            f"{{layer}}.{old}", f"{{layer}}.{new}"
        )
        text = text.replace(old, new) if old == "_proj" else text
    wrong = save(tmp_path / "wrong.toml", text)
    done = command("convert", path, "-o", tmp_path / "m.oam", "--map", wrong, "--check")
    assert done.exit_code == 1 and "check FAILED" in done.stderr, done.stderr
    for part, heads in (("q", "num_heads"), ("k", "num_kv_heads")):
        name = f'source = "blk.{{layer}}.attn_{part}.weight"'
        text = text.replace(name, f'{name}\ntransform = "half-split"\nheads = "{heads}"')
    right = save(tmp_path / "right.toml", text)
    done = command("convert", path, "-o", tmp_path / "m.oam", "--map", right, "--check", "--force")
    assert done.exit_code == 0, done.stderr
    convert(path, tmp_path / "built-in.oam")
    assert oam_bytes(tmp_path / "m.oam") == oam_bytes(tmp_path / "built-in.oam")
    export = command("export", tmp_path / "m.oam", "-o", tmp_path / "back.gguf", "--map", right)
    assert export.exit_code == 0, export.stderr
    assert command("diff", path, tmp_path / "back.gguf").exit_code == 0


def test_every_transform(tmp_path: Path) -> None:
    """Fused, joined, transposed, stacked and reshaped weights, there and back."""
    config = LLAMA | {"architectures": ["Odd"], "num_hidden_layers": 1}
    source = llama_tensors(config)
    at = "model.layers.0."
    q, k, v = (source.pop(f"{at}self_attn.{name}_proj.weight") for name in "qkv")
    source["fused"] = np.concatenate([q, k, v])
    up, head = source.pop(f"{at}mlp.up_proj.weight"), source.pop("lm_head.weight")
    source |= {"up.left": up[:, :20].copy(), "up.right": up[:, 20:].copy(), "head.T": head.T.copy()}
    source["scale"] = source.pop("model.norm.weight").reshape(1, -1, 1)
    names = {
        name: theirs for name, theirs in NAMES.items() if name not in ("attn.q", "attn.k", "attn.v", "mlp.up")
    }
    text = toml(names, accepts="hf:Odd")
    text = text.replace('source = "lm_head.weight"', 'source = "head.T"\ntransform = "transpose"')
    text = text.replace(
        'source = "model.norm.weight"',
        'source = "scale"\ntransform = "reshape"\nshape = [1, "hidden_size", 1]',
    )
    parts = ", ".join(f'"layers.{{layer}}.attn.{name}.weight"' for name in "qkv")
    text += f'[[rules]]\ntargets = [{parts}]\nsource = "fused"\ntransform = "split"\n'
    text += (
        '[[rules]]\ntarget = "layers.{layer}.mlp.up.weight"\nsources = ["up.left", "up.right"]\n'
        'transform = "concat"\naxis = 1\nsizes = [20, 12]\n'
    )
    path = save(tmp_path / "m.toml", text)
    folder = write_hf(tmp_path / "hf", config, source)
    oazoo.convert(folder, tmp_path / "m.oam", map_file=path)
    found = oam_values(tmp_path / "m.oam")
    for name, value in (("attn.q", q), ("attn.k", k), ("attn.v", v), ("mlp.up", up)):
        assert np.array_equal(found[f"layers.0.{name}.weight"], value)
    assert np.array_equal(found["head.weight"], head)
    oazoo.export(tmp_path / "m.oam", tmp_path / "back", map_file=path)
    assert safetensors_bytes(tmp_path / "back") == safetensors_bytes(folder)
    without = save(tmp_path / "n.toml", text.replace("sizes = [20, 12]\n", ""))
    oazoo.convert(folder, tmp_path / "n.oam", map_file=without)
    with pytest.raises(TranslationError, match="to run it backwards, the rule has to state sizes"):
        oazoo.export(tmp_path / "n.oam", tmp_path / "no", map_file=without)


def test_experts(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["OddMoe"], "num_hidden_layers": 2}
    source = llama_tensors(config)
    for layer in range(2):
        at = f"model.layers.{layer}"
        for part in ("gate", "up", "down"):
            one = source.pop(f"{at}.mlp.{part}_proj.weight")
            source |= {f"{at}.expert{n}.{part}": one * (n + 1) for n in range(3)}
        source[f"{at}.router"] = np.ones((3, 32), np.float32)
    names = {name: theirs for name, theirs in NAMES.items() if not name.startswith("mlp.")}
    extra = "num_experts = 3\nexperts_per_token = 2\nexpert_size = 48\n"
    text = toml(names, CONFIG + extra, accepts="hf:OddMoe")
    text += rule("layers.{layer}.moe.router.weight", "model.layers.{layer}.router")
    text += rule("layers.{layer}.mlp.gate.weight", "nothing.{layer}", "optional = true")
    for part in ("gate", "up", "down"):
        text += rule(
            f"layers.{{layer}}.moe.{part}.weight",
            f"model.layers.{{layer}}.expert{{expert}}.{part}",
            'transform = "stack"',
        )
    folder, path = write_hf(tmp_path / "hf", config, source), save(tmp_path / "m.toml", text)
    oazoo.convert(folder, tmp_path / "m.oam", map_file=path)
    stack = oam_values(tmp_path / "m.oam")["layers.1.moe.up.weight"]
    assert np.array_equal(stack[2], source["model.layers.1.expert2.up"])
    oazoo.export(tmp_path / "m.oam", tmp_path / "back", map_file=path)
    assert safetensors_bytes(tmp_path / "back") == safetensors_bytes(folder)


def test_settings_need_not_exist(tmp_path: Path) -> None:
    """A file of weights alone, described by the map alone."""
    values = {key: value for key, value in LLAMA.items() if isinstance(value, (int, float))}
    config = CONFIG
    for key, value in values.items():
        config = config.replace(f'{{ from = "{key}" }}', str(value))
    save_file(llama_tensors(LLAMA), tmp_path / "weights.safetensors")
    own = save(tmp_path / "m.toml", toml(config=config))
    report = oazoo.convert(tmp_path / "weights.safetensors", tmp_path / "m.oam", map_file=own, check=True)
    assert report.translator == "mine" and "config.json" not in str(report.source["files"])
    assert (
        report.check is not None and report.check.to_json()["why_not"] == "config.json names no architecture"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name = ", "nam = "), "unknown key 'nam'"),
        (('name = "mine"\n', ""), "name must be a text"),
        (('"hf:LlamaForCausalLM"', '"LlamaForCausalLM"'), "is not NAMING:ARCHITECTURE; namings: hf, gguf"),
        (('"hf:LlamaForCausalLM"', '"zip:X"'), "'zip:X', which is not NAMING:ARCHITECTURE"),
        (('accepts = ["hf:LlamaForCausalLM"]\n', ""), "accepts must list what is read"),
        (('family = "decoder"', 'family = "encoder3"'), "config: unknown model family 'encoder3'"),
        (("head_dim = 8", "head_dim = 7"), "config: DecoderConfig: head_dim = 7 must be even"),
        (("head_dim = 8", "head_dim = 6"), "for layers.0.attn.q.weight the config asks for .24, 32."),
        (("head_dim = 8", "headdim = 8"), "unknown field 'headdim'"),
        (("head_dim = 8", 'head_dim = "8"'), "field 'head_dim' must be int"),
        (
            ('from = "rope_theta"', 'from = "rope.theta"'),
            "config.json: rope.theta is missing; .*takes rope_theta from it",
        ),
        (('from = "rope_theta"', 'form = "x", from = "rope_theta"'), "config.rope_theta: unknown key 'form'"),
        (('{ from = "rope_theta" }', "{ from = 3 }"), "from must be the key of a setting"),
        (("tied_embeddings = false", "tied_embeddings = true"), "rule 3 .*|the model has no such parameter"),
        (
            ('source = "lm_head.weight"', 'source = "lm_hat.weight"'),
            "lacks 1 tensor: lm_hat.weight .for head.weight",
        ),
        (
            ('source = "lm_head.weight"', 'source = "model.norm.weight"'),
            "no use for 1 tensor: 'lm_head.weight'",
        ),
        (('target = "head.weight"', 'target = "norm.weight"'), "two rules produce norm.weight"),
        (('target = "head.weight"', 'target = "top.weight"'), "top.weight .*the model has no such parameter"),
        (('target = "head.weight"', 'targets = ["head.weight", "norm.weight"]'), "identity has one target"),
        (
            ('source = "lm_head.weight"', 'sources = ["lm_head.weight", "x"]'),
            "only concat and stack have several",
        ),
        (
            ('source = "lm_head.weight"', 'source = "a"\nsources = ["b"]'),
            "needs source or sources, one of them",
        ),
        (('source = "lm_head.weight"', "source = 4"), "sources must be names of tensors"),
        (
            ('"lm_head.weight"', '"lm_head.weight"\ntransform = "rotate"'),
            "unknown transform 'rotate'; known: identity",
        ),
        (('"lm_head.weight"', '"lm_head.weight"\ntransform = "half-split"'), "half-split needs heads"),
        (
            ('"lm_head.weight"', '"lm_head.weight"\ntransform = "half-split"\nheads = "family"'),
            "'family' is no positive",
        ),
        (
            ('"lm_head.weight"', '"lm_head.weight"\naxis = 1'),
            "axis goes with concat and split, not with identity",
        ),
        (
            ('"lm_head.weight"', '"lm_head.weight"\ntransform = "split"\naxis = 9'),
            "axis must be a whole number from 0 to 7",
        ),
        (('"lm_head.weight"', '"lm_head.weight"\ntransform = "split"\naxis = 2'), "has no axis 2"),
        (('"lm_head.weight"', '"lm_head.weight"\noptional = 1'), "optional must be true or false"),
        (('"lm_head.weight"', '"lm_head.weight"\ncode = "x"'), "rule 3: unknown key 'code'"),
        (('"lm_head.weight"', '"lm_{layer}"'), "{layer} must stand in every target"),
        (('"lm_head.weight"', '"lm_{expert}"'), "{expert} stands in the one source of a stack"),
        (("[[rules]]", "[[rule]]"), "unknown key 'rule'"),
        (("[config]", "[config"), "not TOML"),
        (
            ('name = "mine"', 'name = "mine"\nignored = [{pattern = "(", reason = "x"}]'),
            "'\\('|no regular expression",
        ),
        (('name = "mine"', 'name = "mine"\nignored = [{pattern = "x"}]'), "ignored 1: reason must be a text"),
        (('name = "mine"', 'name = "mine"\nignored = 5'), "ignored must be tables"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_toml_that_is_wrong(change: tuple[str, str], message: str, folder: Path, tmp_path: Path) -> None:
    text = toml()
    assert change[0] in text
    path = save(tmp_path / "m.toml", text.replace(*change))
    with pytest.raises(TranslationError, match=message):
        oazoo.convert(folder, tmp_path / "m.oam", map_file=path)
    assert not (tmp_path / "m.oam").exists()


def test_values_of_settings(folder: Path, tmp_path: Path) -> None:
    known = CONFIG + 'activation = { from = "hidden_act", values = { silu = "silu", gl = "gelu" } }\n'
    oazoo.convert(folder, tmp_path / "m.oam", map_file=save(tmp_path / "m.toml", toml(config=known)))
    unknown = CONFIG + 'activation = { from = "hidden_act", values = { gl = "gelu" } }\n'
    path = save(tmp_path / "n.toml", toml(config=unknown))
    with pytest.raises(TranslationError, match=r"hidden_act = 'silu' is not among the values .*: gl"):
        oazoo.convert(folder, tmp_path / "n.oam", map_file=path)
    with pytest.raises(TranslationError, match="no value of hidden_act means activation = silu"):
        oazoo.export(tmp_path / "m.oam", tmp_path / "out", map_file=path)


def test_what_a_map_cannot_express_is_not_exported(folder: Path, tmp_path: Path) -> None:
    own = save(tmp_path / "m.toml", toml())
    changed = LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    oazoo.convert(write_hf(tmp_path / "scaled", changed, llama_tensors(LLAMA)), tmp_path / "s.oam")
    with pytest.raises(TranslationError, match="it has no setting for rope_scaling"):
        oazoo.export(tmp_path / "s.oam", tmp_path / "out", map_file=own)
    wide = LLAMA | {"head_dim": 4}
    oazoo.convert(write_hf(tmp_path / "wide", wide, llama_tensors(wide)), tmp_path / "w.oam")
    with pytest.raises(TranslationError, match="its head_dim is always 8"):
        oazoo.export(tmp_path / "w.oam", tmp_path / "out", map_file=own)
    with pytest.raises(TranslationError, match=r"m\.toml: has no exporter for the family 'decoder' as gguf"):
        oazoo.export(tmp_path / "w.oam", tmp_path / "out.gguf", map_file=own)
    assert not (tmp_path / "out").exists()


def test_hostile_sizes(folder: Path, tmp_path: Path) -> None:
    """A map does not make a checkpoint's numbers trusted."""
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1 << 40}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TranslationError, match="num_layers = 1099511627776 is out of range"):
        oazoo.convert(folder, tmp_path / "m.oam", map_file=save(tmp_path / "m.toml", toml()))


# -- Python ------------------------------------------------------------------------------------------------------------

PYTHON = """
from oazoo.translators.llama import TRANSLATORS as THEIRS
from oazoo.translators.translator import Translator
TRANSLATORS = (Translator("mine", "Mine", ("hf:LlamaForCausalLM",), THEIRS[0].translate),)
"""


def test_python_map(folder: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "my map.py", PYTHON)
    done = command("convert", folder, "-o", tmp_path / "m.oam", "--map", path)
    assert done.exit_code == 0 and "mine → decoder" in done.stderr
    shown = command("convert", folder, "--map", path, "--dry-run", "--json")
    assert json.loads(shown.stdout)["translator"] == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", r"m\.py: the map cannot be run: SyntaxError"),
        (
            "\n\nraise RuntimeError('no luck')",
            r"the map cannot be run: RuntimeError: no luck \(m\.py, line 3\)",
        ),
        ("import nothing_of_this_name", "the map cannot be run: ModuleNotFoundError"),
        ("raise SystemExit(3)", "the map cannot be run: SystemExit: 3"),
        ("x = 1", "defines no TRANSLATORS, a tuple of Translator"),
        ("TRANSLATORS = (3,)", "TRANSLATORS must be a tuple of Translator"),
        (PYTHON + "EXPORTERS = TRANSLATORS", "EXPORTERS must be a tuple of Exporter"),
        (PYTHON + "TRANSLATORS *= 2", "two translators are named 'mine'"),
        (PYTHON.replace("hf:Llama", "Llama"), "is not NAMING:ARCHITECTURE"),
        (
            PYTHON.replace("THEIRS[0].translate", "lambda c: c.config['no']"),
            r"'mine' failed: KeyError: 'no' \(m\.py",
        ),
        (PYTHON.replace("THEIRS[0].translate", "lambda c: 7"), "it gave int, not a Translation"),
        (
            PYTHON.replace("LlamaForCausalLM", "Other").replace("hf:", "gguf:"),
            "the map has no translator for hf",
        ),
    ],
    ids=lambda value: str(value)[-50:],
)
def test_python_that_is_wrong(text: str, message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TranslationError, match=message):
        oazoo.convert(folder, tmp_path / "m.oam", map_file=save(tmp_path / "m.py", text))
    assert not (tmp_path / "m.oam").exists()


def test_choosing_within_a_map(folder: Path, tmp_path: Path) -> None:
    two = PYTHON + 'TRANSLATORS += (Translator("other", "Other", ("hf:Odd",), THEIRS[0].translate),)\n'
    path = save(tmp_path / "m.py", two)
    assert oazoo.convert(folder, tmp_path / "a.oam", map_file=path).translator == "mine"
    assert oazoo.convert(folder, tmp_path / "b.oam", map_file=path, arch="other").translator == "other"
    with pytest.raises(UsageError, match="the map has no translator 'llama'; it has mine, other"):
        oazoo.convert(folder, tmp_path / "c.oam", map_file=path, arch="llama")
    unknown = llama_folder(tmp_path / "unknown", {"architectures": ["Third"]})
    with pytest.raises(
        TranslationError, match="more than one translator for hf checkpoints that declare Third"
    ):
        oazoo.convert(unknown, tmp_path / "c.oam", map_file=path)
    with pytest.raises(UsageError, match="exclude each other"):
        oazoo.convert(folder, tmp_path / "c.oam", map_file=path, arch="raw")


def test_files_that_are_no_maps(folder: Path, tmp_path: Path) -> None:
    for name in ("missing.toml", "missing.py"):
        with pytest.raises(UsageError, match="no such file"):
            oazoo.convert(folder, tmp_path / "m.oam", map_file=tmp_path / name)
    with pytest.raises(UsageError, match=r"a map is a \.toml or a \.py file"):
        oazoo.convert(folder, tmp_path / "m.oam", map_file=folder / "config.json")
    (tmp_path / "bad.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(TranslationError, match="not UTF-8"):
        load_map(tmp_path / "bad.toml")
    (tmp_path / "deep.toml").write_text("x = " + "[" * 20000)
    with pytest.raises(TranslationError, match=r"nested too deeply|not TOML"):
        load_map(tmp_path / "deep.toml")
    assert (
        command("convert", folder, "-o", tmp_path / "m.oam", "--map", tmp_path / "missing.py").exit_code == 2
    )


# -- packages ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Gives a function that makes modules of the given texts available as entry points."""

    def clear() -> None:
        for cached in (module.plugins, translators, exporters):
            cached.cache_clear()

    def install(**modules: str) -> None:
        points = []
        for name, text in modules.items():
            save(tmp_path / f"plugged_{name}.py", text)
            points.append(EntryPoint(name, f"plugged_{name}", registry.GROUP))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(registry, "entry_points", lambda group: points)
        clear()

    yield install
    monkeypatch.undo()
    clear()
    for name in [name for name in sys.modules if name.startswith("plugged_")]:
        del sys.modules[name]


def test_packages(installed: Callable[..., None], folder: Path, tmp_path: Path) -> None:
    odd = PYTHON.replace("hf:LlamaForCausalLM", "hf:OddForCausalLM").replace('"mine"', '"odd"')
    installed(odd=odd, broken="import nothing_of_this_name", late=PYTHON.replace('"mine"', '"llama"'))
    assert "odd: hf:OddForCausalLM" in supported()
    unusual = llama_folder(tmp_path / "unusual", {"architectures": ["OddForCausalLM"]})
    report = oazoo.convert(unusual, tmp_path / "a.oam")
    assert report.translator == "odd"
    faults = plugin_faults()
    assert len(faults) == 2 and set(faults) <= set(report.notes)
    assert (
        "'broken' of the package 'plugged_broken' cannot be used: " in faults[0]
        and "ModuleNotFoundError" in faults[0]
    )
    assert "'llama' of the package 'plugged_late' is left out: the name is taken" in faults[1]
    assert oazoo.convert(folder, tmp_path / "b.oam").translator == "llama"
    with pytest.raises(TranslationError, match="'broken' of the package 'plugged_broken' cannot be used"):
        oazoo.convert(folder, tmp_path / "c.oam", arch="broken")
    with pytest.raises(TranslationError, match=r"(?s)unsupported architecture 'Third'.*plugged_broken"):
        oazoo.convert(llama_folder(tmp_path / "third", {"architectures": ["Third"]}), tmp_path / "c.oam")


def test_exporters_of_packages(installed: Callable[..., None], folder: Path, tmp_path: Path) -> None:
    text = f"""
from pathlib import Path
from oazoo.translators.own_map import load_map
MAP = load_map({str(tmp_path / "m.toml")!r})
TRANSLATORS, EXPORTERS = MAP.translators, MAP.exporters
"""
    save(tmp_path / "m.toml", toml(accepts="hf:OddForCausalLM"))
    odd = LLAMA | {"architectures": ["OddForCausalLM"]}
    source = write_hf(tmp_path / "odd", odd, llama_tensors(odd))
    installed(odd=text)
    oazoo.convert(source, tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "back")  # as it was declared
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["OddForCausalLM"]
    assert safetensors_bytes(tmp_path / "back") == safetensors_bytes(source)


def test_nothing_is_loaded_from_the_folder_of_a_model(folder: Path, tmp_path: Path) -> None:
    """A map runs because somebody named it, and for no other reason."""
    for name in ("my_map.py", "oazoo.py", "sitecustomize.py", "translator.py"):
        save(folder / name, f"open({str(tmp_path / 'ran')!r}, 'w')")
    with plan(folder) as planned:
        assert planned.translator.name == "llama"
    assert not (tmp_path / "ran").exists()
    assert isinstance(load_map(save(tmp_path / "m.toml", toml())), OwnMap)
