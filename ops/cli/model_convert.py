"""`model convert`: a GGUF file made into a folder that nodes read; `model add` does it by itself."""

from pathlib import Path
from typing import Annotated

import typer

from dataplane.protocol.model_sources import is_remote
from ops.cli.examples import examples
from ops.client.api import CommandError
from ops.client.screen import AsJson, print_answer, progress_bar
from ops.local.checkpoints import describe_checkpoint


@examples("tidepool model convert SmolLM2-135M-Instruct.Q4_1.gguf /models/smollm2-135m")
def convert_model(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", exists=True, dir_okay=False, help="The GGUF file.")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Where the checkpoint goes; default: FILE, without .gguf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a GGUF file into a Hugging Face checkpoint: weights, tokenizer and chat template.

    \b
    Quantized weights are unpacked into bfloat16. A file with features that Tidepool does not support is refused.
    """
    target, made = convert_file(file, folder)
    answer = {"converted": made} | describe_checkpoint(target)
    print_answer(answer, f"{target} is {'converted' if made else 'there already, from the same file'}", as_json=as_json)


def folder_of(source: str, to: Path | None) -> str:
    """A source that nodes can read: a GGUF file is converted, into `to` or next to it; others are returned unchanged.

    Raises:
        CommandError: the file cannot be converted, or `to` is given for something else.
    """
    if is_remote(source) or not source.endswith(".gguf"):
        if to is not None:
            raise typer.BadParameter("--to is for a GGUF file: --path FILE.gguf --to DIR")
        return source
    return str(convert_file(Path(source), to)[0])


def convert_file(file: Path, folder: Path | None) -> tuple[Path, bool]:
    """The folder that the file is converted into, and whether that was done now; with a progress bar.

    Raises:
        CommandError: the file cannot be converted, or the extra is not installed.
    """
    try:
        from ops.gguf.convert import convert
        from ops.gguf.header import GgufError
    except ImportError as error:
        raise CommandError(f"{file}: install the gguf extra to convert GGUF files ({error})") from error
    file = file.expanduser().resolve()
    target = (folder or file.with_suffix("")).expanduser().resolve()
    try:
        doing = f"converting {file.name}"
        with progress_bar(doing, in_bytes=True) as report:
            made = convert(file, target, lambda done, total: report(doing, done, total))
    except GgufError as error:
        raise CommandError(str(error)) from error
    return target, made
