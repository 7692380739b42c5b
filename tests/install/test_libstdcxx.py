"""dmuon shares PyTorch's libstdc++, also if the compiler would link an archive of its own into each module."""

import subprocess
from pathlib import Path

import pytest

LISTS = f"""
cmake_minimum_required(VERSION 3.24)
project(made LANGUAGES CXX)
include({Path(__file__).parents[2] / "cmake/libstdcxx.cmake"})
add_library(module MODULE module.cpp)
"""
SOURCE = "#include <sstream>\nstd::string printed(long x) { std::ostringstream out; out << x; return out.str(); }\n"


@pytest.mark.parametrize("flags", ["", "-static-libstdc++"])
def test_a_module_has_no_streams_of_its_own(tmp_path, flags):
    (tmp_path / "CMakeLists.txt").write_text(LISTS)
    (tmp_path / "module.cpp").write_text(SOURCE)
    made = tmp_path / "made"
    configure = ["cmake", "-S", tmp_path, "-B", made, f"-DCMAKE_CXX_FLAGS={flags}"]
    said = subprocess.run(configure, check=True, capture_output=True, text=True).stdout
    assert ("links libstdc++ as an archive" in said) == bool(flags)
    subprocess.run(["cmake", "--build", made], check=True, capture_output=True)
    table = ["readelf", "--dyn-syms", "--dynamic", "--wide", made / "libmodule.so"]
    needed = subprocess.run(table, check=True, capture_output=True, text=True).stdout
    assert "[libstdc++.so.6]" in needed and "UNIQUE" not in needed
