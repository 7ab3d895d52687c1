"""Continuous batching without a model: whatever joins or leaves, each sequence is computed in order and finishes."""

from hypothesis import given
from hypothesis import strategies as st

from dataplane.engines.torch.batching import Chunk, InstanceQueue, TokenSequence
from dataplane.memory.kv_cache import blocks_for
from dataplane.messages import Tier
from tests.dataplane.engines.torch.drive import request


def sequence(order: int, prompt_tokens: int, max_tokens: int = 4, tier: Tier = "IW-N") -> TokenSequence:
    made = request(str(order), range(prompt_tokens), max_tokens=max_tokens, tier=tier)
    return TokenSequence(request=made, order=order, added_s=0.0)


def queue_of(blocks: int, *, batch_max: int = 8, prefill_tokens_max: int = 8) -> InstanceQueue:
    return InstanceQueue(blocks=blocks, block_tokens=4, batch_max=batch_max, prefill_tokens_max=prefill_tokens_max)


def run(queue: InstanceQueue, chunks: list[Chunk]) -> list[TokenSequence]:
    """Pretend the forward pass: every made token is its own position. Returns what finished."""
    for chunk in chunks:
        made, chunk.sequence.cached = chunk.makes_token, chunk.sequence.cached + chunk.count
        if made:
            chunk.sequence.tokens.append(len(chunk.sequence.tokens))
    done = [c.sequence for c in chunks if c.sequence.generated == c.sequence.request.max_tokens]
    for finished in done:
        queue.remove(finished)
    return done


def test_prompts_are_prefilled_in_chunks_within_the_limit_of_a_step() -> None:
    queue = queue_of(20)
    first, second = sequence(1, 11), sequence(2, 6)
    queue.add(first)
    queue.add(second)
    chunks = queue.plan_step()
    assert [(c.sequence, c.count, c.makes_token) for c in chunks] == [(first, 8, False)]
    run(queue, chunks)
    chunks = queue.plan_step()
    assert [(c.sequence, c.count, c.makes_token) for c in chunks] == [(first, 3, True), (second, 5, False)]
    run(queue, chunks)
    assert [(c.sequence, c.count) for c in queue.plan_step()] == [(first, 1), (second, 1)]


def test_tiers_go_first_then_arrival() -> None:
    queue = queue_of(20, batch_max=2)
    for order, tier in enumerate(("NIW", "IW-N", "IW-F", "IW-N")):
        queue.add(sequence(order, 2, tier=tier))  # type: ignore[arg-type]
    queue.plan_step()
    assert [s.order for s in queue.running] == [2, 1]
    assert [s.order for s in queue.waiting] == [3, 0]


def test_the_head_of_the_line_is_not_overtaken_by_a_smaller_one() -> None:
    queue = queue_of(4)
    for order, tokens in enumerate((6, 8, 1)):
        queue.add(sequence(order, tokens))
    queue.plan_step()
    assert [s.order for s in queue.running] == [0]
    assert [s.order for s in queue.waiting] == [1, 2]


def test_out_of_blocks_the_youngest_waits_again_and_keeps_its_tokens() -> None:
    queue = queue_of(4)
    old, young = sequence(1, 6, max_tokens=8), sequence(2, 6, max_tokens=8)
    queue.add(old)
    queue.add(young)
    while not queue.preemptions_total:
        run(queue, queue.plan_step())
    assert queue.running == (old,)
    assert queue.waiting == (young,)
    assert (young.cached, young.blocks) == (0, [])
    assert young.tokens[:6] == list(range(6))
    assert young.generated > 0


def test_remaining_tokens_counts_unprefilled_prompt_and_unmade_tokens() -> None:
    queue = queue_of(20)
    only = sequence(1, 11, max_tokens=4)
    queue.add(only)
    seen = [only.remaining_tokens]
    while queue.sequences:
        run(queue, queue.plan_step())
        seen.append(only.remaining_tokens if queue.sequences else 0)
    assert seen == [15, 7, 3, 2, 1, 0]


arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.integers(1, 20),
        st.integers(1, 12),
        st.sampled_from(("IW-F", "IW-N", "NIW")),
        st.one_of(st.none(), st.integers(1, 30)),
    ),
    min_size=1,
    max_size=12,
)


@given(arrivals=arrivals, blocks=st.integers(8, 12), batch_max=st.integers(1, 5), prefill_max=st.integers(1, 9))
def test_everybody_finishes_and_every_block_comes_back(
    arrivals: list[tuple[int, int, int, Tier, int | None]], blocks: int, batch_max: int, prefill_max: int
) -> None:
    """Each arrival: step number, prompt, max_tokens, tier, and the step at which its client goes away, if it does."""
    queue = queue_of(blocks, batch_max=batch_max, prefill_tokens_max=prefill_max)
    due = [
        (step, gone, sequence(order, prompt, max_tokens, tier))
        for order, (step, prompt, max_tokens, tier, gone) in enumerate(arrivals)
    ]
    finished: list[TokenSequence] = []
    cancelled = 0
    for step in range(2000):
        for _, _, joining in (entry for entry in due if entry[0] == step):
            queue.add(joining)
        for _, _, leaving in (entry for entry in due if entry[1] == step and entry[2] in queue.sequences):
            queue.remove(leaving)
            cancelled += 1
        if not queue.sequences and step > 30:
            break
        chunks = queue.plan_step()
        check(queue, chunks, batch_max, prefill_max)
        finished += run(queue, chunks)
    assert not queue.sequences
    assert queue.pool.used_blocks == 0
    assert len(finished) + cancelled <= len(due)
    for ended in finished:
        assert ended.tokens == list(range(len(ended.request.prompt) + ended.request.max_tokens))
    never_cancelled = [s for _, gone, s in due if gone is None]
    assert all(s in finished for s in never_cancelled)


def check(queue: InstanceQueue, chunks: list[Chunk], batch_max: int, prefill_max: int) -> None:
    held = [block for running in queue.running for block in running.blocks]
    assert len(set(held)) == len(held) == queue.pool.used_blocks
    assert bool(chunks) == bool(queue.sequences)
    assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks) <= batch_max
    assert sum(chunk.count for chunk in chunks if chunk.count > 1) <= prefill_max
    for chunk in chunks:
        assert 1 <= chunk.count <= chunk.sequence.pending
        last = chunk.sequence.cached + chunk.count
        assert blocks_for(last, queue.block_tokens) <= len(chunk.sequence.blocks)
