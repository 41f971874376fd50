"""Sums in each other's memory, which GPUs of one host read and write: of few rows, most of NCCL's time is latency.

Stands for vllm/distributed/device_communicators/custom_all_reduce.py (v0.22.1).

Brings      on two H200, Llama-8B shape in bfloat16, 32 requests of base, tokens a second: NCCL 8,514; sums in each
            other's memory 9,188 (8 %); a sum and the norm behind it in one kernel 9,630 (5 % more); terms that are
            brought in words, not fetched, 9,782 (1.6 %). With 8 adapters: 7,041, 7,549, 7,930, and 8,710 once that
            norm adds what o and down lack (docs/tensor-parallel.md, "Measured on two H200";
            engine-decode-tp2-nccl-rank16-h200-2026-11-23.json has NCCL's)
Implements  `PeerGroup` is a `ProcessGroup` that takes small sums and gathers itself and leaves all others to
            torch.distributed: `all_reduce`, `all_gather`, `look_up_own`, `look_up_own_in`. It has `add_and_norm` and
            `add_adapters_and_norm` besides, which fused blocks ask for (`minivllm.gpu.fused.blocks.SumsInNorms`).
            `minivllm.parallel.ranks.make_group` alone knows this folder: without the folder, its import there and its
            two lines NCCL takes every sum
Options     `disable_custom_all_reduce`; the variable MINIVLLM_PEER_SUMS
Costs       some 1,000 lines, and 23 MB of each GPU on two, 73 on eight. At the start all kinds of sums are tried beside
            NCCL's, and where any is wrong, or memory cannot be shared, NCCL takes all. A rank that waits for one that
            has ended must be let go by a number in the host's memory (`release`). On more than two GPUs nothing was
            measured
"""
