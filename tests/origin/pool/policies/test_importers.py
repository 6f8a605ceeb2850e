"""Samples in the public formats are read; what is wrong is refused by file, row and column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tailrace.ledger.errors import CallerError
from tailrace.origin.pool.policies.trace import TokenSpeeds, import_trace, write_trace

SAMPLES = Path(__file__).parent / "samples"
FILES = {
    "azure": SAMPLES / "azure.csv",
    "burstgpt": SAMPLES / "burstgpt.csv",
    "mooncake": SAMPLES / "mooncake.jsonl",
    "servegen": SAMPLES / "servegen.csv",
}
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
OWN = "model,arrival_s,duration_s\n"


def test_a_sample_of_each_format_is_read() -> None:
    azure = import_trace("azure", FILES["azure"], speeds=TokenSpeeds(100.0, 10.0))
    mooncake = import_trace("mooncake", FILES["mooncake"], speeds=TokenSpeeds(100.0, 10.0))
    burst = import_trace("burstgpt", FILES["burstgpt"])
    assert len(azure) == len(mooncake) == len(burst) == 36
    assert set(burst.names) == {"ChatGPT", "GPT-4"} and azure.names == ("azure",)
    # They hold the same arrivals, each in the unit of its format.
    assert np.allclose(azure.arrival_s, mooncake.arrival_s - mooncake.arrival_s[0], atol=0.002)
    assert np.allclose(np.floor(mooncake.arrival_s), burst.arrival_s)
    assert np.array_equal(azure.duration_s, mooncake.duration_s)


def test_servegens_rates_become_arrivals_of_a_seed() -> None:
    first = import_trace("servegen", FILES["servegen"], seed=1)
    assert np.array_equal(
        first.arrival_s, import_trace("servegen", FILES["servegen"], seed=1).arrival_s
    )
    rates = [float(line.split(",")[1]) for line in FILES["servegen"].read_text().splitlines()]
    expected = sum(rates) * 600
    assert expected / 2 < len(first) < expected * 2
    silent = (first.arrival_s >= 1800) & (first.arrival_s < 3000)
    assert not silent.any()  # two windows of the sample have rate 0


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    trace = import_trace("burstgpt", FILES["burstgpt"])
    write_trace(trace, tmp_path / "t.csv")
    again = import_trace("tailrace", tmp_path / "t.csv")
    assert again.names == trace.names and np.array_equal(again.model, trace.model)
    assert np.allclose(again.arrival_s, trace.arrival_s)
    assert np.allclose(again.duration_s, trace.duration_s, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "text", "says"),
    [
        ("azure", "TIMESTAMP,GeneratedTokens\n", "row 1: column ContextTokens: is missing"),
        ("azure", "when,ContextTokens,GeneratedTokens\n", "row 1: column TIMESTAMP: is missing"),
        ("azure", AZURE + "12.5,1,2\n", "row 2: column TIMESTAMP: '12.5' is not a date"),
        (
            "azure",
            AZURE + "2023-11-16 18:00:00,1,2\n2023-11-16 18:00:01+00:00,1,2\n",
            "row 3: column TIMESTAMP: only some times have a time zone",
        ),
        ("azure", AZURE + "2023-11-16 18:00:00,-1,2\n", "row 2: column ContextTokens: '-1' is neg"),
        ("azure", AZURE, "holds no request"),
        ("burstgpt", BURST + "5,m,1,2,3\n", "row 2: column Log Type: the row has 5 values for 6"),
        ("burstgpt", BURST + "-5,m,1,2,3,x\n", "row 2: column Timestamp: '-5' is negative"),
        ("burstgpt", BURST + "5ms,m,1,2,3,x\n", "row 2: column Timestamp: '5ms' is not a number"),
        ("burstgpt", BURST + "nan,m,1,2,3,x\n", "row 2: column Timestamp: 'nan' is negative or"),
        ("burstgpt", BURST + "5,,1,2,3,x\n", "row 2: column Model: is missing"),
        ("burstgpt", BURST + "5,m,1,2,4,x\n", "row 2: column Total tokens: 4 is not 3, the sum"),
        (
            "burstgpt",
            BURST + "5,m,1,2,3,x\n5000000000,m,1,2,3,x\n",
            "row 3: column Timestamp: is over a month after the row above",
        ),
        ("mooncake", "not json\n", "row 1: is not a JSON object"),
        ("mooncake", '{"timestamp": true}\n', "row 1: column timestamp: True is not a number"),
        ("mooncake", '{"timestamp": 1.5}\n', "row 1: column timestamp: 1.5 is not a whole number"),
        ("mooncake", '{"timestamp": 5, "output_length": 1}\n', "column input_length: is missing"),
        (
            "mooncake",
            '{"timestamp": 9000, "input_length": 1, "output_length": 1}\n'
            '{"timestamp": 10, "input_length": 1, "output_length": 1}\n',
            "row 2: column timestamp: is before the row above (one unit, in order)",
        ),
        ("servegen", "5,1,1,Gamma,1,1\n", "row 1: column start: 5 begins no window"),
        ("servegen", "0,-1,1,Gamma,1,1\n", "row 1: column rate: '-1' is negative"),
        ("servegen", "0,1,1,Zipf,1,1\n", "row 1: column distribution: 'Zipf' is unknown"),
        ("servegen", "0,1,1,Gamma,1,1,1\n", "row 1: column scale: is followed by more values"),
        ("servegen", "0,1,1,Gamma\n", "row 1: column shape: is missing"),
        ("tailrace", OWN + "m,1,-1\n", "row 2: column duration_s: '-1' is negative"),
        ("tailrace", "\xff", "row 1: column model: is missing"),
    ],
)
def test_what_is_wrong_is_named_by_file_row_and_column(
    form: str, text: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_text(text, "utf-8")
    with pytest.raises(CallerError) as caught:
        import_trace(form, path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


def test_a_file_that_is_none_and_a_format_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="cannot be read"):
        import_trace("azure", tmp_path / "missing")
    (tmp_path / "bytes").write_bytes(b"model\xff")
    with pytest.raises(CallerError, match="is not UTF-8"):
        import_trace("tailrace", tmp_path / "bytes")
    with pytest.raises(CallerError, match="no format is called 'vhs'"):
        import_trace("vhs", tmp_path)
