"""Sums in each other's memory, which GPUs of one host read and write: of few rows, most of NCCL's time is latency.

Stands for vllm/distributed/device_communicators/custom_all_reduce.py (v0.22.1).

Brings      on two H100, Llama-8B shape in bfloat16, tokens a second of 1, 32 and 128 requests of base: NCCL 247, 7,049
            and 23,934; sums here 258, 7,475 and 25,540; a sum and the norm behind it in one kernel 267, 7,703 and
            26,631. That kernel adds what adapters add to o and down, too: 32 and 128 requests with 8 adapters had
            6,039 and 19,611 by NCCL, 6,457 and 21,730 by sums alone, 6,703 and 22,724 so (docs/tensor-parallel.md)
Implements  `PeerGroup` is a `ProcessGroup` that takes small sums and gathers itself and leaves all others to
            torch.distributed: `all_reduce`, `all_gather`. It has `add_and_norm` and `add_adapters_and_norm` besides,
            which fused blocks ask for (`minivllm.gpu.fused.blocks.SumsInNorms`). `minivllm.parallel.ranks.make_group`
            alone knows this folder: without the folder, its import there and its two lines NCCL takes every sum
Options     `disable_custom_all_reduce`
Costs       some 690 lines, and 6 MB of each GPU. At the start all kinds of sums are tried beside NCCL's, and where any
            is wrong, or memory cannot be shared, NCCL takes all. A rank that waits for one that has ended must be let
            go by a number in the host's memory (`release`). On more than two GPUs nothing was measured
Went        terms brought in words of 4 bytes and a count (NCCL's protocol LL) instead of fetched ones, and a kernel for
            a process's own rows of the vocabulary: together 5 % of 1 and 32 requests, no more of 128, and 5 and 3 % of
            32 and 128 with 8 adapters
"""
