"""The phases of a program's start as spans and as a line of its log."""

import re
import subprocess
import sys
import time

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshrl.core.telemetry.start import Phase, Start, process_began_s, start_of
from meshrl.core.telemetry.tracing import Tracing, build_provider


def test_phases_are_spans_inside_the_start_and_one_line(said: list[str]) -> None:
    exporter = InMemorySpanExporter()
    provider = build_provider("inference", [exporter])
    tracing = Tracing(provider.get_tracer("meshrl"), provider)
    tracing.start = start = Start(time.time() - 100.0)
    assert start_of(tracing) is start
    start.phases = [Phase("imports", start.began_s, start.began_s + 9.0)]
    start.phases.append(Phase("vllm.graphs", start.began_s + 30.0, start.began_s + 41.25))  # of another process
    with start.phase("tokenizer"):
        pass
    start.end(tracing)
    provider.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"rl.start", "rl.start.imports", "rl.start.vllm.graphs", "rl.start.tokenizer"}
    whole, graphs = spans.pop("rl.start"), spans["rl.start.vllm.graphs"]
    assert abs(graphs.end_time - graphs.start_time - 11_250_000_000) < 1000  # a float of today counts 238 ns
    assert whole.start_time == int(start.began_s * 1e9)
    assert {span.parent.span_id for span in spans.values() if span.parent} == {whole.context.span_id}
    assert re.search(r"imports 0\.0 to 9\.0, vllm\.graphs 30\.0 to 41\.2, tokenizer 1\d\d\.\d to 1\d\d\.\d", said[0])


def test_start_begins_with_the_process() -> None:
    code = "import time; time.sleep(0.5); from meshrl.core.telemetry.start import process_began_s as b; print(b())"
    before_s = time.time()
    began_s = float(subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True).stdout)
    assert before_s - 0.1 < began_s < time.time() - 0.4  # the kernel counts hundredths of a second
    assert abs(process_began_s() - Start().phases[0].began_s) < 5.0  # it may be kept waiting between two clocks
