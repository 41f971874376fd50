"""`minivllm bench cpu`: decoding on this machine's CPU, beside transformers and PEFT.

Everything is measured in one run, in turns, `rounds` times; medians are reported. All engines compute in float32 with
the same number of threads, on the same prompts and the same adapters: random ones over all linear layers, of rank 4,
8, 16 and 32, made for the benchmark.
"""

import datetime
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from minivllm.assembly import LLMEngine
from minivllm.commands.common import checkout_folder, console, print_json
from minivllm.commands.random_adapter import save_random_adapter
from minivllm.engine_args import EngineArgs
from minivllm.lora.request import LoRARequest
from minivllm.models.demo_model import demo_model_path
from minivllm.sampling_params import SamplingParams
from minivllm.worker.cpu_threads import available_cores, set_num_threads

RANKS = (4, 8, 16, 32)
# The batch of eight: an adapter each, by rank; None is the base model.
MIXED: tuple[int | None, ...] = (4, 8, 16, 32, None, 4, 16, None)
SINGLE_RANK = 16
PROMPT_TOKENS = 32
PAIRED = "LoRA on, none used"


def run_bench(
    against: list[str], max_tokens: int, rounds: int, threads: int | None = None, as_json: bool = False
) -> None:
    """Measure and print.

    against      of `options.PEERS`
    max_tokens   2 to 480
    rounds       at least 1
    threads      of every engine; None = OMP_NUM_THREADS, or else what is fastest for the base model as it starts
    """
    before = torch.get_num_threads()
    try:
        _run_bench(against, max_tokens, rounds, threads, as_json)
    finally:
        set_num_threads(before)


def _run_bench(against: list[str], max_tokens: int, rounds: int, threads: int | None, as_json: bool) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(console=console, transient=True, disable=as_json) as bar,
    ):
        bench = CpuBench(Path(folder), max_tokens, threads)
        jobs = bench.jobs(against)
        task = bar.add_task("measuring", total=(rounds + 1) * len(jobs))
        rates: dict[str, list[float]] = {name: [] for name in jobs}
        for number in range(rounds + 1):
            for name, job in jobs.items():
                rate = job()
                if number:  # the first round warms up
                    rates[name].append(rate)
                bar.advance(task)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        report = {
            "date": str(datetime.date.today()),
            "machine": machine(against, bench.threads),
            **bench.report(medians),
        }
    if as_json:
        print_json(report)
    else:
        show(report)


class CpuBench:
    """The engines under test, and how each answers the same requests.

    threads   how many CPU threads all of them compute on, in words; PyTorch is set to that number
    """

    def __init__(self, folder: Path, max_tokens: int, threads: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.model = str(demo_model_path())
        self.adapters = {
            rank: save_random_adapter(folder / f"r{rank}", self.model, rank, seed=rank, dtype=torch.float32)
            for rank in RANKS
        }
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(100, 40_000, (len(MIXED), PROMPT_TOKENS), generator=generator).tolist()
        lora = {"enable_lora": True, "max_loras": len(RANKS), "max_lora_rank": max(RANKS)}
        # Given, so that it does not change meanwhile: a number would be compared with another.
        threads = threads or min(torch.get_num_threads(), available_cores())
        self.lora_engine = self._engine(threads=threads, **lora)
        self.threads = str(self.lora_engine.runner.cpu_threads)
        set_num_threads(threads)
        self.plain_engine = self._engine(threads=threads)
        self.step_ms: dict[str, list[float]] = {"base": [], "mixed": [], "plain": [], "idle": []}

    def _engine(self, **options: Any) -> LLMEngine:
        args = EngineArgs(
            self.model, dtype="float32", max_model_len=512, enable_prefix_caching=False, **options
        )
        return LLMEngine(args.create_engine_config())

    def jobs(self, against: list[str]) -> dict[str, Callable[[], float]]:
        """Name -> a function that answers once and returns tokens a second."""
        base, single = (None,) * len(MIXED), (SINGLE_RANK,)
        jobs: dict[str, Callable[[], float]] = {
            "minivllm base x8": lambda: self.run(self.plain_engine, base, "base"),
            "minivllm mixed x8": lambda: self.run(self.lora_engine, MIXED, "mixed"),
            "minivllm base x1": lambda: self.run(self.plain_engine, (None,)),
            "minivllm one adapter x1": lambda: self.run(self.lora_engine, single),
            PAIRED: self.run_paired,
        }
        if against:
            peers = Peers(self, with_peft="peft" in against)
            if "transformers" in against:
                jobs["transformers base x8"] = lambda: peers.run(base)
                jobs["transformers base x1"] = lambda: peers.run((None,))
            if "peft" in against:
                jobs["PEFT mixed x8"] = lambda: peers.run(MIXED)
                jobs["PEFT one adapter x1"] = lambda: peers.run(single)
        return jobs

    def run(self, engine: LLMEngine, ranks: tuple[int | None, ...], label: str | None = None) -> float:
        """Answer one batch; tokens a second, prompts included in the time."""
        started = time.perf_counter()
        steps = list(self.steps(engine, ranks))
        seconds = time.perf_counter() - started
        if label is not None:
            self.step_ms[label].append(statistics.median(steps[1:]) * 1e3)
        return len(ranks) * self.max_tokens / seconds

    def steps(self, engine: LLMEngine, ranks: tuple[int | None, ...], tag: str = "r") -> Iterator[float]:
        """Run a batch step by step; seconds of each."""
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)
        for row, rank in enumerate(ranks):
            lora = LoRARequest(f"r{rank}", rank, str(self.adapters[rank])) if rank else None
            prompt = {"prompt_token_ids": self.prompts[row]}
            engine.add_request(f"{tag}{row}", prompt, params, lora_request=lora)
        while engine.has_unfinished_requests():
            started = time.perf_counter()
            engine.step()
            yield time.perf_counter() - started

    def run_paired(self) -> float:
        """An engine with LoRA that nobody uses beside one without, step by step in turns."""
        base = (None,) * len(MIXED)
        plain, idle = self.steps(self.plain_engine, base), self.steps(self.lora_engine, base)
        pairs = list(zip(plain, idle))[1:]
        self.step_ms["plain"] += [seconds * 1e3 for seconds, _ in pairs]
        self.step_ms["idle"] += [seconds * 1e3 for _, seconds in pairs]
        return len(base) * 1e3 / statistics.median(self.step_ms["idle"])

    def report(self, rates: dict[str, float]) -> dict[str, Any]:
        """Rates, and what the targets speak of."""
        step_ms = {name: statistics.median(values) for name, values in self.step_ms.items()}
        lora = self.lora_engine.get_metrics()["lora"]
        report: dict[str, Any] = {
            "tokens_per_second": rates,
            "step_ms": step_ms,
            "lora_added_ms": step_ms["mixed"] - step_ms["base"],
            "idle_lora_overhead": step_ms["idle"] / step_ms["plain"] - 1,
            "largest_demo_adapter_ms": self.first_use_ms(),
            "adapter_load_ms": 1e3 * lora["load_seconds"] / lora["loads"],
            "adapter_activate_ms": 1e3 * lora["activate_seconds"] / lora["activations"],
        }
        pairs = {
            "base x8 over transformers": ("minivllm base x8", "transformers base x8"),
            "base x1 over transformers": ("minivllm base x1", "transformers base x1"),
            "mixed x8 over PEFT": ("minivllm mixed x8", "PEFT mixed x8"),
            "one adapter x1 over PEFT": ("minivllm one adapter x1", "PEFT one adapter x1"),
        }
        report["ratios"] = {name: rates[a] / rates[b] for name, (a, b) in pairs.items() if b in rates}
        return report

    def first_use_ms(self) -> float:
        """Milliseconds from disk to slot for the largest adapter of adapters/."""
        folders = [path.parent for path in checkout_folder().glob("adapters/*/adapter_model.safetensors")]
        largest = max(folders, key=lambda folder: (folder / "adapter_model.safetensors").stat().st_size)
        times = []
        for number in range(5):
            lora = LoRARequest(f"first-use-{number}", 1000 + number, str(largest))
            started = time.perf_counter()
            self.lora_engine.add_lora(lora)
            times.append((time.perf_counter() - started) * 1e3)
            self.lora_engine.remove_lora(lora.lora_int_id)
        return statistics.median(times)


class Peers:
    """transformers' generate, and PEFT's on top of it."""

    def __init__(self, bench: CpuBench, with_peft: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.bench = bench
        self.base = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()
        if with_peft:
            from peft import PeftModel

            model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
            first, *others = bench.adapters
            self.peft = PeftModel.from_pretrained(model, bench.adapters[first], adapter_name=f"r{first}")
            for rank in others:
                self.peft.load_adapter(bench.adapters[rank], adapter_name=f"r{rank}")
            self.peft.eval()

    @torch.inference_mode()
    def run(self, ranks: tuple[int | None, ...]) -> float:
        """Answer the batch that `CpuBench.run` answers; tokens a second."""
        prompts = torch.tensor(self.bench.prompts[: len(ranks)])
        model, extra = self.base, {}
        if len(ranks) == 1 and ranks[0]:
            model = self.peft
            self.peft.set_adapter(f"r{ranks[0]}")
        elif any(ranks):
            model = self.peft
            extra["adapter_names"] = [f"r{rank}" if rank else "__base__" for rank in ranks]
        tokens = self.bench.max_tokens
        started = time.perf_counter()
        output = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            **extra,
        )
        seconds = time.perf_counter() - started
        return output[:, prompts.shape[1] :].numel() / seconds


def machine(peers: list[str], threads: str) -> dict[str, str]:
    """Device and versions."""
    device = f"CPU {platform.machine()}, {threads}"
    return {"device": device, "torch": torch.__version__, **{name: metadata.version(name) for name in peers}}


def show(report: dict[str, Any]) -> None:
    where = "{device}, torch {torch}".format_map(report["machine"])
    table = Table("float32, greedy", "tokens/s", title=where)
    for name, rate in report["tokens_per_second"].items():
        # The pair's steps are timed in turns, the prompts' step left out, which the other rows have in them.
        table.add_row(f"{name} (x8, no prompts)" if name == PAIRED else name, f"{rate:.0f}")
    console.print(table)
    for name, ratio in report["ratios"].items():
        console.print(f"{name}: {ratio:.2f}x", highlight=False)
    ms = report["step_ms"]
    console.print(
        f"a step of eight: base {ms['base']:.1f} ms, mixed {ms['mixed']:.1f} ms, so LoRA adds "
        f"{report['lora_added_ms']:.1f} ms; LoRA on and not used: {report['idle_lora_overhead']:+.1%}",
        highlight=False,
    )
    console.print(f"largest demo adapter, disk to slot: {report['largest_demo_adapter_ms']:.0f} ms")
