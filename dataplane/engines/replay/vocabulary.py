"""The vocabulary of replayed text: plain words, so that the output of a replay engine can be read."""

_TEXT = """
a all and anchor are around as at bay beach before behind below berth between beyond bird blue boat boats bow breeze
bridge bright buoy by calm cape captain cargo chart clear cliff cloud coast cold coral course crab crew current dawn
day deck deep dock dolphin down drift dune dusk each east ebb eddy evening every fair falls far ferry fish fleet
flood flow foam fog fold from full gale gentle glass gold green gull harbour haul heron high horizon hull in inlet
into is island it jetty keel kelp knot lagoon lamp land lantern large lee light line long low mast mid mist moon
moor morning mud narrow near net never new night noon north now oar ocean of off old on open or osprey out over
pass pearl pier pilot plank point pool port quay quiet rain reef rest returns rises river rock rope round rudder
runs sail sailor salt sand sea seal seaward shallow shell shine ship ships shoal shore silver slack slow small
south sound spray star stars steady stern still stone storm strait stream surf swell the then tide tides to
toward turn turns under until up vessel wake warm watch water wave waves west wharf when where while white wide
wind with
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
"""Token id i is the text WORDS[i]."""

REPLAY_EMBEDDING_SIZE = 256
"""Numbers of a replayed embedding."""
