"""A process of polysite's own starts without MLflow, and can still use it."""

import subprocess
import sys

from polysite.own_process import worker_command


def said(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_monai_is_imported_without_mlflow_and_tracking_finds_it_all_the_same():
    code = """
import sys
from polysite import own_process
own_process.begin()
import polysite.training.tasks
blocked = sys.modules["mlflow"]
own_process.unblock("mlflow")
import mlflow
print(blocked, mlflow.__name__)
"""
    assert said(code) == "None mlflow\n"


def test_a_worker_is_the_main_function_of_its_module():
    command = worker_command("json.tool", "--help")
    done = subprocess.run(command, capture_output=True, text=True)
    assert "main() takes" in done.stderr  # json.tool's main wants no words: it was called with one
