"""What instances do in simulated time, and the profiles corrected by it, as the planner's hourly step does."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from controlplane.policies.assignment.facts import PlacedInstance
from controlplane.policies.facts import EndpointGpu, ModelGpu
from controlplane.policies.placement.facts import Profile
from controlplane.policies.profile_correction import (
    WINDOW_S,
    CorrectionSettings,
    LoadSums,
    ProfileFacts,
    choose_correction,
    load_sums,
)

_EVERY_S = 60.0


class ObservedProfiles:
    """The profiles with their corrections. `settings` None: nothing is observed, and nothing corrected."""

    def __init__(self, profiles: Mapping[ModelGpu, Profile], settings: CorrectionSettings | None) -> None:
        self.factors: dict[ModelGpu, float] = {}
        """On tokens/s, of the profiles that were changed."""
        self._profiles = profiles
        self._settings = settings
        self._sums: defaultdict[tuple[EndpointGpu, int], LoadSums] = defaultdict(LoadSums)
        self._moved_s: dict[ModelGpu, float] = {}
        self._observed_s = -_EVERY_S

    def observe(self, instances: Iterable[PlacedInstance], ttft_s: float, now_s: float) -> None:
        """Take in what the instances do now, at most once a minute. `ttft_s`: IW-F's objective."""
        if self._settings is None or now_s < self._observed_s + _EVERY_S:
            return
        self._observed_s = now_s
        start_s = int(now_s) // WINDOW_S * WINDOW_S
        objectives = {key.model: ttft_s for key in self._profiles}
        for key, sums in load_sums(instances, ttft_s=objectives, stale_s=0.0).items():
            self._sums[key, start_s] += sums

    def correct(self, now_s: float) -> None:
        """Correct all profiles by what was observed."""
        if self._settings is None:
            return
        for pair, profile in self._profiles.items():
            windows = [sums.window(start_s) for (key, start_s), sums in self._sums.items() if key.pair == pair]
            facts = ProfileFacts(
                tokens_per_s=profile.tokens_per_s,
                windows=windows,
                factor=self.factors.get(pair, 1.0),
                moved_s=self._moved_s.get(pair),
            )
            correction = choose_correction(facts, now_s, self._settings)
            if correction.moved_s is not None:
                self.factors[pair], self._moved_s[pair] = correction.factor, correction.moved_s
