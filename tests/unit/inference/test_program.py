"""What `inference` refuses before it loads anything."""

import sys

import pytest

from meshrl.inference import main as program


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_engine_that_the_hub_could_not_name_to_others_is_refused(host, monkeypatch, capsys):
    hub = ["--weight-broadcast.type", "stream", "--weight-broadcast.address", "10.0.0.1:50053"]
    monkeypatch.setattr(sys, "argv", ["inference", "--server.host", host, *hub])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert f"inference.server.host is {host!r}, all addresses of this machine" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--url", "https://10.0.0.3:8000", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 0
