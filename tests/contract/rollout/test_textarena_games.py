"""textarena's games, played by a policy whose moves a test gives."""

import pytest

PATIENCE_S = 120.0


async def test_a_game_of_two_is_self_play_that_trains_both(start_mesh, make_group, engine):
    moves = iter(["[4]", "[0]", "[1]", "[2]", "[7]"])
    engine.reply = lambda body: next(moves)
    mesh = await start_mesh([engine], env=[{"id": "textarena:TicTacToe-v0"}], seq_len=8192)
    request = make_group(environment="textarena:TicTacToe-v0", group_size=1, deadline_s=PATIENCE_S)
    *rollouts, summary = await mesh.collect(request)
    assert summary.finished == 1
    player, opponent = sorted(rollouts, key=lambda rollout: -rollout.reward)
    assert [(player.agent, player.reward, player.num_turns), (opponent.agent, opponent.reward, opponent.num_turns)] == [
        ("player", 1.0, 3),
        ("opponent", -1.0, 2),
    ]
    assert player.metrics["finished"] == opponent.metrics["finished"] == 1.0
    assert [len(rollout.samples) for rollout in (player, opponent)] == [1, 1]


@pytest.mark.parametrize(
    ("game", "moves", "outcome"),
    [
        ("LightsOut-v0", ["[9 9]", "[9 9]", "[9 9]"], ("finished", "invalid_move")),
        ("2048-v0", ["[up]", "[left]"], ()),
    ],
)
async def test_a_game_of_one_is_played_to_its_end_or_to_the_last_turn(
    start_mesh, make_group, engine, game, moves, outcome
):
    said = iter(moves)
    engine.reply = lambda body: next(said)
    env = [{"id": f"textarena:{game}", "args": {"player": {"max_turns": len(moves)}}}]
    mesh = await start_mesh([engine], env=env, seq_len=8192)
    rollout, summary = await mesh.collect(make_group(environment=f"textarena:{game}", deadline_s=PATIENCE_S))
    assert getattr(rollout, "message", "") == ""
    assert summary.finished == 1
    assert 1 <= rollout.num_turns <= len(moves)
    assert {name: rollout.metrics[name] for name in ("finished", "invalid_move")} == {
        "finished": float("finished" in outcome),
        "invalid_move": float("invalid_move" in outcome),
    }
