"""How a test gets a thing. Where two would do, the first is meant: it is ready sooner.

a model         `models.save_base(folder, variant)`, a folder of transformers'; linears alone: `linears.ToyModel`
adapters        `small.write_adapter(folder, seed)`; PEFT's: `adapters.save_adapter(folder, base, seed, **config)`;
                anything wrong with them: `adapter_folders.write`, `malformed_adapters`
an engine       `small.SmallWorld(folder).engine()`, without transformers and PEFT; with what they answer:
                the fixture `world`, a `engines.tiny_world`; with adapters of one's own: `engines.TinyWorld`;
                adapters for experts: `experts.sparse_world`, with tokens of their own: `tokens.TokenSet`;
                a world of any kind is made once a run by `engines.made_once`; little room: `settings`
busy engines    `arrivals.serve_arrivals(engine, rng, count, ask)`, and `arrivals.check_answers(asked, logits_of)`
a step ahead    `ahead.run_ahead(engine)`; captured steps: `gpu.graphed_engine(world, "decodes")`
a process       `engines.TinyWorld.engine_process()`, and what may be done to it: `processes`; it is a fork
                (`tools.forked`), since a fresh interpreter imports torch for most of two seconds
many ranks      `ranks.in_lockstep(size, work)`, threads of this process
a server        `servers.serving(world, *names)`, and `servers.client_of(server)`
the demo        `demo.demo_base()`, `demo.adapter_folder(name)`, `demo.task_prompts(n)`
slots alone     `managers.make_manager(slots)`
a simulation    `fleets.fleet()`
patience        `waiting.wait_until(condition)`; an event loop that never really sleeps: `virtual_time.run`

An answer of PEFT: `world.oracle().greedy(name, prompt, max_tokens)`, or `world.assert_serves(engine, pairs)`.
"""
