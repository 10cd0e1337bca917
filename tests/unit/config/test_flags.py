import pytest

from meshrl.core.config import ConfigError
from meshrl.core.config.schema import SECTION, flag
from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.serve import check_bind


def test_a_flag_is_named_as_the_program_that_was_started_knows_it() -> None:
    assert flag("filters.zero_signal", off=True, environ={}) == "--no-filters.zero-signal"
    under_rl = {SECTION: "orchestrator"}
    assert flag("seed", environ={SECTION: "inference_2"}) == "--inference.seed"
    assert flag("filters.zero_signal", off=True, environ=under_rl) == "--no-orchestrator.filters.zero-signal"
    assert flag("server.insecure", environ={SECTION: "trainer"}) == "--trainer.server.insecure"


def test_the_advice_of_a_server_under_rl_is_a_flag_of_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECTION, "trainer")
    with pytest.raises(ConfigError, match=r"allow it with --trainer\.server\.insecure$"):
        check_bind(ServerConfig(host="0.0.0.0", port=1))
