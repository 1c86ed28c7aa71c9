"""The first lines that `hvdtrain run` prints tell of the settings that act."""

import pytest

from hvdtrain.config import SETTINGS_VARIABLE
from hvdtrain.script.run import ScriptOptions, explanation
from hvdtrain.script.scan import Scan
from hvdtrain.world import detect_world


@pytest.mark.parametrize(("launched", "told"), [
    ('{"batch": "per_rank", "lr_scaling": "sqrt"}',
     "batch sizes are those of each rank, as written; learning rate: sqrt scaling"),
    ("{}", "batch sizes are those of all ranks together; the learning rate stays")])
def test_settings_of_the_launcher_are_told(launched, told, tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("import keras\nkeras.Sequential([]).fit([1.0])\n")
    monkeypatch.setenv(SETTINGS_VARIABLE, launched)
    text = explanation(ScriptOptions(program=str(script)), Scan.of(script, tmp_path),
                       detect_world({}))
    assert text.splitlines()[1].strip() == told
