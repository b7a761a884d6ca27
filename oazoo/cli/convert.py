"""Translate a checkpoint into an .oam file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oazoo.cli.common import (
    emit_json,
    emit_table,
    format_bytes,
    format_duration,
    json_option,
    progress_bar,
    quiet_option,
    say,
    stdout_console,
)

if TYPE_CHECKING:
    from oazoo.zoo.check import CheckReport


@click.command()
@click.argument("source", metavar="SRC")
@click.option("-o", "--output", metavar="OUT.oam", type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--arch",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Translator to use. raw: keep every tensor under its own name, without a model.",
)
@click.option(
    "--map",
    "map_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A map of your own, .toml or .py, instead of the built-in ones. A .py file is run: name only what you trust.",
)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "f32", "f16", "bf16"]),
    default="keep",
    show_default=True,
    help="What dense tensors become. keep: quantised ones stay packed where that loses nothing, else f16.",
)
@click.option(
    "--experts-per-token",
    type=int,
    help="Experts that a token goes to, of a checkpoint that OA wrote, if it has any.",
)
@click.option(
    "--heads",
    type=int,
    help="Attention heads of a checkpoint whose file does not tell: one that OA wrote, DiT, SiT.",
)
@click.option(
    "--vocabulary",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The oa_bpe_v1 or oazoo_char_v1 vocabulary of such a checkpoint; without one, 256 tokens are the bytes.",
)
@click.option(
    "--set",
    "chosen",
    multiple=True,
    metavar="NAME=VALUE",
    help="What the checkpoint does not state, such as a_form=softplus for a Mamba-3 of before June 2026.",
)
@click.option("--no-tokenizer", is_flag=True, help="Weights only.")
@click.option("--dry-run", is_flag=True, help="Print the plan, checked whole; write nothing.")
@click.option(
    "--check", is_flag=True, help="Compare logits with the source afterwards, on the Vulkan device."
)
@click.option(
    "--check-tolerance",
    type=float,
    metavar="X",
    help="Largest difference of a logit that passes. Default: 0.0003 of the largest one and twice what rounding explains.",
)
@click.option("--force", is_flag=True, help="Replace OUT.oam if it exists.")
@json_option
@quiet_option
def command(
    source: str,
    output: Path | None,
    arch: str,
    map_file: Path | None,
    dtype: str,
    heads: int | None,
    vocabulary: Path | None,
    chosen: tuple[str, ...],
    experts_per_token: int | None,
    no_tokenizer: bool,
    dry_run: bool,
    check: bool,
    check_tolerance: float | None,
    force: bool,
    as_json: bool,
) -> int:
    """Translate SRC into an .oam file, with its tokenizer, chat template and provenance inside.

    SRC is a GGUF, SafeTensors or ONNX file, a checkpoint of nanoGPT, a Hugging Face folder, a name of the zoo, or a URI that
    'oazoo pull' takes. Needs no Vulkan device, except for --check, which runs a few prompts through the source in NumPy
    and through the result on the device; exit status 1 if they differ, and OUT.oam is kept.
    """
    from oazoo.formats.atomic import check_output
    from oazoo.zoo.convert import convert, plan_conversion

    if output is None and not dry_run:
        raise click.UsageError("say where to write: -o OUT.oam (or --dry-run to see the plan)")
    if check_tolerance is not None and not check:
        raise click.UsageError("--check-tolerance goes with --check")
    if check and dry_run:
        raise click.UsageError("--check compares what was written; with --dry-run nothing is")
    settings = _settings(chosen)
    if output is not None:
        check_output(output, overwrite=force)
    if _is_oa(source):
        return _convert_oa(Path(source), output, heads, experts_per_token, vocabulary, force, as_json)
    if experts_per_token is not None or vocabulary is not None:
        raise click.UsageError("--experts-per-token and --vocabulary are for checkpoints that OA wrote")
    if dry_run:
        with (
            progress_bar() as progress,
            plan_conversion(
                source,
                arch=arch,
                dtype=dtype,
                with_tokenizer=not no_tokenizer,
                map_file=map_file,
                chosen=settings,
                heads=heads,
                progress=progress,
                notify=say,
            ) as planned,
        ):
            if as_json:
                emit_json(planned.to_json())
                return 0
            stdout_console().print(planned.table())
            for note in planned.notes:
                say(note)
            say(
                f"{planned.output_bytes:,} bytes would be written, with at most "
                f"{format_bytes(planned.peak_bytes)} of memory; nothing was"
            )
        return 0
    assert output is not None
    start = time.perf_counter()
    with progress_bar() as progress:
        report = convert(
            source,
            output,
            arch=arch,
            dtype=dtype,
            heads=heads,
            overwrite=force,
            with_tokenizer=not no_tokenizer,
            map_file=map_file,
            chosen=settings,
            check=check,
            check_tolerance=check_tolerance,
            progress=progress,
            notify=say,
        )
    found = report.check
    status = 0 if found is None or found.passed else 1
    if as_json:
        emit_json(report.to_json())
        return status
    if report.rounded:
        stdout_console().print(report.table())
    if report.nonfinite:
        stdout_console().print(report.nonfinite_table())
    say(
        f"{output}: {report.translator} → {report.config.family} in {format_duration(time.perf_counter() - start)}"
    )
    for line in report.summary():
        say(f"  {line}")
    if found is not None:
        from oazoo.zoo.check import CheckReport

        assert isinstance(found, CheckReport)
        _show(found, output)
    return status


def _settings(pairs: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE pairs as a dictionary."""
    settings = dict[str, str]()
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not name or not sign:
            raise click.UsageError(f"--set takes NAME=VALUE, not {pair[:60]!r}")
        settings[name] = value
    return settings


def _show(found: CheckReport, output: Path) -> None:
    """The check as a table, and what it means."""
    if not found.compared:
        say(f"nothing to check: {found.why_not}")
        return
    emit_table(
        ["prompt", "tokens", "largest difference", "largest logit", "same best token"],
        [
            (
                repr(p.prompt),
                p.tokens,
                f"{p.max_difference:.3g}",
                f"{p.largest_logit:.3g}",
                f"{p.same_best} of {p.tokens}",
            )
            for p in found.prompts
        ],
        right=["tokens", "largest difference", "largest logit", "same best token"],
        title="Logits of the source (NumPy, float32) and of the result",
    )
    if found.rounding is None:
        say(
            "weights were rounded; how much of the difference that explains cannot be computed for this source"
        )
    elif found.rounding:
        say(f"rounding weights explains a difference of {found.rounding:.3g}")
    if found.passed:
        say(
            f"check passed on {found.device}: {found.max_difference:.3g} at most, {found.tolerance:.3g} allowed"
        )
    else:
        say(
            f"check FAILED on {found.device}: logits differ by {found.max_difference:.3g}, {found.tolerance:.3g} are "
            f"allowed. {output} does not answer as its source does; it is kept for a closer look "
            "(--check-tolerance sets the limit)",
            style="bold red",
        )


def _is_oa(source: str) -> bool:
    """Whether it is a local file that OA wrote."""
    path = Path(source)
    if path.suffix != ".oam" or not path.is_file():
        return False
    from oazoo.formats.oam import OamSource
    from oazoo.zoo.files import open_file
    from oazoo.zoo.oa_checkpoint import is_oa

    with open_file(path) as opened:
        return isinstance(opened, OamSource) and is_oa(opened)


def _convert_oa(
    path: Path,
    output: Path | None,
    heads: int | None,
    experts_per_token: int | None,
    vocabulary: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    from oazoo.zoo.oa_checkpoint import import_oa

    if output is None:
        raise click.UsageError(
            "a checkpoint that OA wrote has no plan to show; say where to write: -o OUT.oam"
        )
    config = import_oa(
        path,
        output,
        heads=heads,
        experts_per_token=experts_per_token,
        vocabulary=vocabulary,
        overwrite=force,
    )
    if as_json:
        emit_json({"output": str(output), "family": config.family, "model": config.to_json()})
    else:
        say(
            f"{output}: OA's {config.family}, {config.num_layers} layers of width {config.hidden_size}, with what its "
            "optimizer keeps"
        )
    return 0
