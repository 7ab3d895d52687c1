"""The settings that every host of a node has, the agent's and those of its followers. Every name can be set as
`TIDEPOOL_AGENT_<NAME>`.
"""

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from dataplane.checkpoints.local import Sources
from dataplane.checkpoints.sources import FetchRules


class HostSettings(BaseSettings):
    """Settings of one host."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEPOOL_AGENT_", frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    node_key: SecretStr = Field(min_length=8)
    """key that this agent presents to the control plane, and its followers to it"""
    device: str = "cpu"
    """PyTorch device: cpu, cuda, or cuda:N"""
    checkpoints_dir: Path = Path("~/.cache/tidepool/checkpoints")
    """folder that remote checkpoints are downloaded to"""
    checkpoint_roots: tuple[Path, ...] | None = None
    """folders that model paths must lie in, a JSON list; unset: any folder of this node"""
    private_hosts: tuple[str, ...] = ()
    """host names, addresses and networks that may be fetched from although they are not public, a JSON list"""
    checkpoint_bytes_max: int = Field(4 * 2**40, ge=1)
    """size of one remote checkpoint"""
    checkpoint_time_max_s: float = Field(6 * 3600.0, gt=0)
    """time limit for downloading one checkpoint"""
    tls_ca_file: Path | None = None
    """authorities that a gateway's certificate is verified against, or by a follower the agent's, PEM; unset: the
    system's"""

    @property
    def sources(self) -> Sources:
        """The rules for model sources."""
        rules = FetchRules(
            private_hosts=self.private_hosts,
            bytes_max=self.checkpoint_bytes_max,
            time_max_s=self.checkpoint_time_max_s,
        )
        return Sources(folder=self.checkpoints_dir, rules=rules, roots=self.checkpoint_roots)
