"""What is the torch engine's own: sampling, broken models, the arena. The common contract is in tests/contracts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.errors import BadRequestError, ModelLoadError
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.slots import slot_for_one
from tests.dataplane.engines.torch.tiny import VOCABULARY, greedy_tokens, spec_of

PROMPT = list(range(10, 30))
Checkpoint = Callable[[str], Path]


def engine(checkpoint: Checkpoint, *architectures: str, **changes: Any) -> TorchEngine:
    """An engine with one instance per architecture, named "a", "b", ..."""
    given: dict[str, Any] = {"weights_bytes": 2**21, "kv_bytes": 2**19, "block_tokens": 4, **changes}
    made = TorchEngine(TorchEngineSettings(**given), lambda: 0.0)
    for instance_id, architecture in zip("abc", architectures, strict=False):
        made.load(instance_id, spec_of(architecture, checkpoint(architecture)))
    return made


def sampled(seed: int = 3, **fields: Any) -> dict[str, Any]:
    return {"temperature": 0.9, "top_p": 0.95, "seed": seed, "max_tokens": 20, "ignore_eos": True, **fields}


def test_seeded_sampling_is_the_same_alone_batched_and_continued(checkpoint: Checkpoint) -> None:
    slot = engine(checkpoint, "llama")
    slot.add(request("r", PROMPT, **sampled()))
    alone = drain(slot).tokens["r"]
    assert len(alone) == 20

    company = [request(f"c{n}", PROMPT[n:], **sampled(seed=n)) for n in range(6)]
    together = drain(slot, later={0: company[:3], 2: [request("r", PROMPT, **sampled())], 5: company[3:]})
    assert together.tokens["r"] == alone

    for made in (1, 7, 19):
        slot.add(request("r", PROMPT, generated=alone[:made], **sampled()))
        assert drain(slot).tokens["r"] == alone[made:]


def test_seed_temperature_and_top_p_all_matter(checkpoint: Checkpoint) -> None:
    slot = engine(checkpoint, "llama")
    variants = [
        sampled(),
        sampled(seed=4),
        sampled(temperature=3.0),
        sampled(top_p=0.5, temperature=3.0),
        sampled(temperature=0.0),
    ]
    for number, fields in enumerate(variants):
        slot.add(request(str(number), PROMPT, **fields))
    assert len(set(drain(slot).tokens.values())) == len(variants)


def test_end_of_sequence_stops_and_ignoring_it_goes_on_without_it(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen2")
    stopping = next(
        prompt
        for prompt in ([start, start + 1, start + 2] for start in range(3, 90))
        if len(greedy_tokens(folder, prompt, 24)) < 24
    )
    expected = greedy_tokens(folder, stopping, 24)
    slot = engine(checkpoint, "qwen2")
    slot.add(request("stops", stopping, max_tokens=24))
    slot.add(request("goes-on", stopping, max_tokens=24, ignore_eos=True))
    gathered = drain(slot)
    assert gathered.tokens["stops"] == expected
    assert gathered.finished == {"stops": "stop", "goes-on": "length"}
    assert len(gathered.tokens["goes-on"]) == 24
    assert gathered.tokens["goes-on"][: len(expected)] == expected
    assert 2 not in gathered.tokens["goes-on"]


def test_a_model_that_breaks_in_a_step_fails_alone(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = engine(checkpoint, "llama", "qwen3")
    skeleton = slot.models["llama"].weights.skeleton

    def break_down(**_: object) -> None:
        raise RuntimeError("kernel exploded")

    slot.add(request("bad-1", PROMPT, instance_id="a"))
    slot.add(request("bad-2", PROMPT, instance_id="a"))
    slot.add(request("good", PROMPT, instance_id="b"))
    with monkeypatch.context() as patch:
        patch.setattr(skeleton.model, "forward", break_down)
        gathered = drain(slot)
    assert set(gathered.errors) == {"bad-1", "bad-2"}
    assert "llama" in gathered.errors["bad-1"]
    assert "kernel exploded" in gathered.errors["bad-1"]
    assert gathered.tokens["good"] == greedy_tokens(checkpoint("qwen3"), PROMPT, 8)
    assert [instance.kv_used_bytes for instance in slot.stats().instances] == [0, 0]

    slot.add(request("again", PROMPT, instance_id="a"))
    assert drain(slot).tokens["again"] == greedy_tokens(checkpoint("llama"), PROMPT, 8)


def test_logits_that_are_not_numbers_end_that_request_alone(checkpoint: Checkpoint) -> None:
    slot = engine(checkpoint, "llama")
    slot.add(request("warm", PROMPT))
    drain(slot)
    model: Any = slot.models["llama"].weights.skeleton.model
    model.get_input_embeddings().weight[50] = float("nan")
    slot.add(request("poisoned", [50, 11], max_tokens=4))
    slot.add(request("healthy", [12, 13], max_tokens=4))
    gathered = drain(slot)
    assert "not numbers" in gathered.errors["poisoned"]
    assert gathered.finished["healthy"] == "length"


def test_tokens_outside_of_the_vocabulary_are_refused(checkpoint: Checkpoint) -> None:
    slot = engine(checkpoint, "llama")
    for wrong in ([3, VOCABULARY], [-1]):
        with pytest.raises(BadRequestError, match="outside of the vocabulary of 97"):
            slot.add(request("r", wrong))
    assert not slot.has_work()


def test_a_bad_model_beside_a_good_one_changes_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    slot = engine(checkpoint, "llama")
    slot.add(request("r", PROMPT))
    first = slot.step()
    with pytest.raises(ModelLoadError):
        slot.load("b", spec_of("broken", tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match="loaded already"):
        slot.load("a", spec_of("llama", checkpoint("llama")))
    with pytest.raises(ModelLoadError, match="is loaded from"):
        slot.load("b", spec_of("llama", checkpoint("qwen3")))
    rest = drain(slot).tokens["r"]
    assert first[0].token_ids + rest == greedy_tokens(checkpoint("llama"), PROMPT, 8)


def test_an_evicted_skeleton_points_nowhere(checkpoint: Checkpoint) -> None:
    settings = slot_for_one([checkpoint("llama"), checkpoint("qwen3")], kv_bytes=2**15)
    slot = engine(checkpoint, "llama", "qwen3", **vars(settings))
    for instance_id in "ab":
        slot.add(request(instance_id, PROMPT, instance_id=instance_id))
        drain(slot)
    models = {name: slot.models[name].weights.skeleton.model for name in ("llama", "qwen3")}
    assert {parameter.device.type for parameter in models["llama"].parameters()} == {"meta"}
    addresses = [parameter.data_ptr() for parameter in models["qwen3"].parameters()]
    assert max(addresses) - min(addresses) < settings.weights_bytes
    assert slot.stats().resident_models == ("qwen3",)
