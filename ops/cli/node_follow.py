"""`node follow`: make this machine another host of a slot."""

from typing import Annotated

import typer

from ops.cli.examples import examples
from ops.cli.processes import running


@examples(
    "TIDEPOOL_AGENT_NODE_KEY=... TIDEPOOL_AGENT_DEVICE=cuda tidepool node follow --head http://10.0.0.1:9000 --rank 1"
)
def follow_node(
    head: Annotated[str, typer.Option(metavar="URL", help="The agent of the first host, in the network of the hosts.")],
    rank: Annotated[int, typer.Option(min=1, max=63, help="Number of this host in the slot; the agent's is 0.")],
    slot: Annotated[int, typer.Option(min=0, help="Place of the slot in TIDEPOOL_AGENT_SLOTS of the agent.")] = 0,
) -> None:
    """Run a follower: this host's GPUs are of a slot of another host's agent, whose models vLLM runs on all of them.

    \b
    The slot has "hosts" in TIDEPOOL_AGENT_SLOTS of that agent. Settings of the follower, of those of agents:
    TIDEPOOL_AGENT_NODE_KEY (the agent's own), _DEVICE, _CHECKPOINTS_DIR, _CHECKPOINT_ROOTS, _PRIVATE_HOSTS,
    _CHECKPOINT_BYTES_MAX, _CHECKPOINT_TIME_MAX_S and _TLS_CA_FILE. vLLM's own ports have no authentication:
    the hosts need a private network.
    """
    with running():
        from dataplane.agent.host_settings import HostSettings
        from dataplane.follower.process import run_follower

        run_follower(HostSettings(), head=head, slot=slot, rank=rank)
