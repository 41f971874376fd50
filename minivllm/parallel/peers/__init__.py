"""Sums in each other's memory, which GPUs of one host read and write: of few rows, most of NCCL's time is latency.

Stands for vllm/distributed/device_communicators/custom_all_reduce.py (v0.22.1).

Brings      on two H100, Llama-8B shape in bfloat16, base, tokens a second of 1, 32 and 128 requests: NCCL 248, 7,068
            and 23,852; sums here 7,506 and 25,771 of 32 and 128; a sum and the norm behind it in one kernel 267, 7,743
            and 26,437. That kernel adds what adapters add to o and down, too: on two H200 that was 10 % of 32 requests
            with 8 adapters (docs/tensor-parallel.md)
Implements  `PeerGroup` is a `ProcessGroup` that takes small sums and gathers itself and leaves all others to
            torch.distributed: `all_reduce`, `all_gather`. It has `add_and_norm` and `add_adapters_and_norm` besides,
            which fused blocks ask for (`minivllm.gpu.fused.blocks.SumsInNorms`). `minivllm.parallel.ranks.make_group`
            alone knows this folder: without the folder, its import there and its two lines NCCL takes every sum
Options     `disable_custom_all_reduce`
Costs       some 690 lines, and 6 MB of each GPU. At the start all kinds of sums are tried beside NCCL's, and where any
            is wrong, or memory cannot be shared, NCCL takes all. A rank that waits for one that has ended must be let
            go by a number in the host's memory (`release`). On more than two GPUs nothing was measured
Went        terms brought in words of 4 bytes and a count (NCCL's protocol LL) instead of fetched ones, and a kernel for
            a process's own rows of the vocabulary: together 281 and 7,995 tokens a second of 1 and 32 requests instead
            of 267 and 7,743 (5 and 3 %), no more of 128
"""
