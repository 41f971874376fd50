"""Many adapters, good and bad, and what PEFT answers with each."""

import random
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from minivllm import LLMEngine
from minivllm.serving.engine_process import EngineProcess
from tests.oracles.peft import Oracle
from tests.worlds.adapters import ADAPTERS, save_adapter
from tests.worlds.engines import engine_process, make_engine
from tests.worlds.models import save_base
from tests.worlds.servers import tokenizer_with_template

PROMPTS = ("a", "tell me", "once upon a time")
MOST_TOKENS = 16


class SoakWorld:
    """A base model and a root folder of adapters: `a00` and so on, of each a second version, and bad ones.

    texts   (adapter or None, prompt) -> the likeliest answers of MOST_TOKENS, one for each version
    """

    def __init__(self, folder: Path, num_adapters: int) -> None:
        self.folder, self.root = folder, folder / "root"
        self.base = save_base(folder / "base")
        tokenizer_with_template().save_pretrained(self.base)
        self.names = [f"a{number:02d}" for number in range(num_adapters)]
        self._save_adapters()
        self.bad = self._save_bad()
        self.texts = self._ask_peft()

    def path(self, name: str) -> Path:
        return self.root / name

    def engine(self, tokenizer: object, **options: object) -> LLMEngine:
        return make_engine(self.base, tokenizer, options)

    def engine_process(self, tokenizer: object, **options: object) -> EngineProcess:
        return engine_process(make_engine, self.base, tokenizer, options)

    def _save_adapters(self) -> None:
        """A few are made by PEFT; the others have the same tensors, each with signs of its own."""
        rng = random.Random(0)
        for number, config in enumerate(ADAPTERS.values()):
            save_adapter(self.folder / "made" / str(number), self.base, number, **config)
        for number, name in enumerate(self.names):
            for version in (name, f"{name}-second"):
                shutil.copytree(self.folder / "made" / str(number % len(ADAPTERS)), self.path(version))
                file = self.path(version) / "adapter_model.safetensors"
                tensors = load_file(file)
                save_file({key: t * rng.choice((-1, 1)) for key, t in tensors.items()}, file)

    def _save_bad(self) -> list[str]:
        good = self.path(self.names[0])
        for name in ("bad-bytes", "bad-shape", "bad-empty"):
            shutil.copytree(good, self.path(name))
        (self.path("bad-bytes") / "adapter_model.safetensors").write_bytes(b"\0" * 100)
        (self.path("bad-empty") / "adapter_model.safetensors").unlink()
        file = self.path("bad-shape") / "adapter_model.safetensors"
        save_file({key: t[:, :-1].contiguous() for key, t in load_file(file).items()}, file)
        return ["bad-bytes", "bad-shape", "bad-empty", "nowhere"]

    def _ask_peft(self) -> dict[tuple[str | None, str], set[str]]:
        oracle, tokenizer = Oracle(self.base), tokenizer_with_template()
        texts: dict[tuple[str | None, str], set[str]] = {}
        for name in [None, *self.names]:
            for version in [None] if name is None else [name, f"{name}-second"]:
                if version is not None:
                    oracle.load(version, self.path(version))
                for prompt in PROMPTS:
                    ids = oracle.greedy(version, tokenizer(prompt)["input_ids"], MOST_TOKENS)
                    text = tokenizer.decode(ids, skip_special_tokens=True)
                    texts.setdefault((name, prompt), set()).add(text)
                if version is not None and len(oracle.known) > 1:
                    oracle.forget(version)
        return texts
