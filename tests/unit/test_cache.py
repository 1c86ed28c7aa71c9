"""The folder for what can be made again."""

from pathlib import Path

from hvdtrain.cache import default_cache


def test_the_nearest_setting_decides():
    assert default_cache({"HVDTRAIN_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert default_cache({"XDG_CACHE_HOME": "/b"}) == Path("/b/hvdtrain")
    assert default_cache({}) == Path.home() / ".cache" / "hvdtrain"
