"""`minivllm generate`: prompts in, answers out, each by the adapter it names."""

import difflib
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from minivllm.assembly import LLM
from minivllm.commands.adapter_folder import register_folder
from minivllm.commands.common import console, parse_adapters, print_json, resolve_model
from minivllm.engine.outputs import RequestOutput
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.sources.resolver import FilesystemResolver

SAMPLING = (
    *("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "max_tokens"),
)


RECORD = re.compile(r'\s*{\s*"(prompt|adapter)"\s*:')


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt and the adapter it wants; None is whatever the line itself may say."""

    text: str
    adapter: str | None = None


def read_prompts(arguments: list[str] | None, file: Path | None) -> list[NamedPrompt]:
    """From the arguments, a file, or stdin; lines that are JSON objects are read as such."""
    if arguments and file:
        raise ValueError("prompts were given as arguments and by --file; use one of the two")
    if arguments:
        return [NamedPrompt(text) for text in arguments]
    if file is None and sys.stdin.isatty():
        raise ValueError("no prompts; give some as arguments, by --file, or on stdin")
    text = sys.stdin.read() if file is None else _read_file(file)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Where the terminal's encoding is not known, Python reads other bytes as halves of characters.
        number = text.count("\n", 0, error.start) + 1
        raise ValueError(f"line {number} of the input is not UTF-8 text; save it as UTF-8") from None
    lines = text.split("\n")  # not splitlines: JSON may hold U+2028 and its like as they are
    prompts = [_read_line(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError("no prompts: the input is empty")
    return prompts


def _read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def _read_line(number: int, line: str) -> NamedPrompt:
    if not line.lstrip().startswith("{"):
        return NamedPrompt(line)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON, or of a size or depth that is none here
        if RECORD.match(line):
            raise ValueError(f"line {number} begins like JSON and is none ({error}): {line[:80]}") from None
        return NamedPrompt(line)  # a prompt may start with a brace
    if not isinstance(record.get("prompt"), str):
        raise ValueError(f'line {number} has no "prompt" text: {line[:80]}')
    adapter = record.get("adapter") or "base"
    if not isinstance(adapter, str):
        raise ValueError(f'line {number}: "adapter" must be a name, got {json.dumps(adapter)}')
    return NamedPrompt(record["prompt"], adapter)


def pick_adapter(
    prompt: NamedPrompt, adapters: dict[str, LoRARequest], folder: FilesystemResolver | None = None
) -> tuple[str, LoRARequest | str | None]:
    """The prompt's text and adapter: one that was given, or the name of one in the folder.

    In `name: prompt` a name counts only if it is an adapter's, or "base". ValueError for an adapter that there is not.
    """
    name, text = prompt.adapter, prompt.text
    if name is None:
        head, colon, rest = text.partition(":")
        if colon and (head.strip() in {"base", *adapters} or _is_in(folder, head.strip())):
            name, text = head.strip(), rest.strip()
    if name is None:
        warn_of_typo(text.partition(":"), adapters)
    if name is None or name == "base":
        return text, None
    if name not in adapters and _is_in(folder, name):
        return text, name
    if name not in adapters:
        known = ", ".join(adapters) or "none"
        where = f" and is not in '{folder.folder}'" if folder else ""
        raise ValueError(f"adapter '{name}' was not given{where}; known: {known}; pass --adapter {name}=PATH")
    return text, adapters[name]


def warn_of_typo(parts: tuple[str, str, str], adapters: Iterable[str]) -> None:
    """Say that `sq1: How many` is a prompt for the base model, where an adapter is called nearly so."""
    head, colon, _ = parts
    near = difflib.get_close_matches(head.strip(), list(adapters), 1, 0.6) if colon else []
    if near:
        Console(stderr=True).print(
            f"[yellow]warning:[/yellow] no adapter is called '{escape(head.strip())}', so this line is a prompt for "
            f"the base model; is '{escape(near[0])}' meant?",
            highlight=False,
            soft_wrap=True,
        )


def _is_in(folder: FilesystemResolver | None, name: str) -> bool:
    return folder is not None and folder.find(name) is not None


def run_generate(
    prompts: Iterable[NamedPrompt],
    model: str | None,
    adapter_specs: list[str],
    adapter_folder: str | None,
    base_model_name: str | None,
    params: SamplingParams,
    options: dict[str, Any],
    chat: bool,
    as_json: bool,
) -> None:
    """Answer everything in one go and print it in the order it came."""
    adapters = parse_adapters(adapter_specs)
    folder = register_folder(adapter_folder, base_model_name, model)
    picked = [pick_adapter(prompt, adapters, folder) for prompt in prompts]
    llm = LLM(resolve_model(model), enable_lora=bool(adapters or folder), **options)
    texts, loras = [text for text, _ in picked], [lora for _, lora in picked]
    if chat and llm.get_tokenizer().chat_template:
        conversations = [[{"role": "user", "content": text}] for text in texts]
        outputs = llm.chat(conversations, params, use_tqdm=not as_json, lora_request=loras)
    else:
        outputs = llm.generate(texts, params, use_tqdm=not as_json, lora_request=loras)
    records = [_record(text, output) for text, output in zip(texts, outputs)]
    if as_json:
        print_json(records)
        return
    for record in records:
        _show(record)


def _record(text: str, output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "prompt": text,
        "adapter": output.lora_request.lora_name if output.lora_request else "base",
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
        "error": output.error,
    }


def _show(record: dict[str, Any]) -> None:
    console.print(f"[bold cyan]{escape(record['adapter'])}[/]: {escape(record['prompt'])}", highlight=False)
    if record["error"]:
        console.print(f"  [red]error:[/red] {escape(record['error'])}", highlight=False)
    console.print(record["text"].strip(), highlight=False, markup=False)
    console.print()
