"""A base model in int8 with adapters in full precision: a quarter of the weights' memory, for the same adapters."""

from examples.common import answer_all, make_engine


def main() -> dict[str, str]:
    engine = make_engine(quantization="torchao")
    names = ["sql", "dates", None]
    answers = dict(zip(["sql", "dates", "base"], answer_all(engine, names)))
    for name, answer in answers.items():
        print(f"{name}: {answer!r}")
    return answers


if __name__ == "__main__":
    main()
