"""What benchmarks refuse before they load anything, and what they say that there is."""

import pytest

from benchmarks import arguments, engine, layer_arguments
from minivllm.config import DTYPES, EVICTION_POLICIES, PUNICA_BACKENDS, SCHEDULING_POLICIES


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["decode", "--repeats", "0"], "--repeats: '0' is not a whole number, 1 or more"),
        (["decode", "--requests", "4,0"], "'0' is not a whole number, 1 or more"),
        (["decode", "--requests", "4,,8"], "'4,,8' has an empty entry"),
        (["decode", "--requests", "8,4,8"], "'8' is named twice"),
        (
            ["decode", "--cases", "base,adapters"],
            "no case 'adapters'; use base, none, a number of adapters, or 8-dora, 8-mix",
        ),
        (["decode", "--cases", "0-dora"], "no case '0-dora'"),
        (["decode", "--device", "gpu"], "there is no 'gpu'; use auto, cpu, cuda or cuda:N"),
        (["decode", "--dtype", "int4"], "there is no 'int4'; use one of auto, float32"),
        (["serve", "--cases", "base,peft"], "there is no 'peft'; use one of base, lora"),
        (["serve", "--rate", "nan"], "'nan' is not a number above 0"),
        (["serve", "--alpha", "-1"], "'-1' is not a number of at least 0"),
        (["switch", "--slots", "1"], "'1' is not a whole number, 2 or more"),
        (["nothing"], "decode"),
    ],
)
def test_the_engine_benchmarks_refuse_nonsense_and_say_what_there_is(capsys, options, said):
    with pytest.raises(SystemExit) as refused:
        engine.parse(options)

    assert refused.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["switch", "--slots", "4", "--adapters", "4"], "more adapters than slots.*give --adapters 5"),
        (["serve", "--slots", "8", "--cpu-loras", "4"], "--cpu-loras 4 is less than --slots 8"),
        (["decode", "--prompt-tokens", "2000"], "2256 tokens, more than --max-model-len 2048"),
        (["decode", "--cases", "8,8-dora"], "case '8-dora' has DoRA adapters; give --enable-dora"),
        (["serve", "--output-max", "1025"], "2049 tokens, more than --max-model-len 2048"),
    ],
)
def test_options_that_cannot_be_together_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        engine.check_together(engine.parse(options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--case", "verify:1:8:16"], "is not phase:tokens:slots:rank"),
        (["--impl", "paged"], "'paged' is not package.module:make"),
        (["--mix", "random"], "there is no 'random'; use one of uniform, zipf, half, ranks"),
        (["--model", "gpt"], "there is no 'gpt'; use one of"),
    ],
)
def test_the_layer_benchmark_does_so_too(capsys, options, said):
    with pytest.raises(SystemExit) as refused:
        layer_arguments.parse(options)

    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_the_command_says_in_one_sentence_what_cannot_be(capsys):
    def main(_):
        raise ValueError("it has another machine")

    with pytest.raises(SystemExit) as refused:
        arguments.run_as_command("bench", main)

    assert (refused.value.code, capsys.readouterr().err) == (2, "bench: error: it has another machine\n")


def test_names_are_those_that_the_engine_knows():
    assert set(arguments.DTYPES) == {"auto", *DTYPES}
    assert arguments.BACKENDS == PUNICA_BACKENDS
    assert (arguments.EVICTION_POLICIES, arguments.SCHEDULING_POLICIES) == (
        EVICTION_POLICIES,
        SCHEDULING_POLICIES,
    )
