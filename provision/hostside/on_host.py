"""Runs a playbook on this host, by an Ansible that comes with it, and reports it to the controller (install/on_host.py). Python 3.10+, standard
library only.

The first line of standard input is JSON: ``{"size": bytes, "files": {name: text}, "arguments": […], "password": text or null}``, where
``@folder@`` is the private folder here; then comes a zip archive of that size. Then lines: ``{"told": …}`` is for the playbook, which
writes a line into the FIFO ``said`` and waits for what all hosts have said in the FIFO ``told``; ``{"supply": [number, name, size]}`` is
followed by a file. What is printed is JSON behind a mark: ``{"event": …}`` (callback_plugins/on_host.py), ``{"want": number of a file}``,
``{"says": line}``, ``{"log": what Ansible prints}``, and ``{"alive": true}`` every few seconds. All of it ends with the controller.
"""

import io
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

from .abandoned import PLACE, PREFIX, remove_abandoned
from .claims import make_locked

ANSWER, ALIVE_S = "===PROVISION-ANSWER===", 10.0
# By no path of the environment: what tasks start must not find it.
RUN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from ansible.cli.playbook import main; main()"
speaking = threading.Lock()


def say(**message):
    with speaking:
        os.write(1, ("\n%s %s\n" % (ANSWER, json.dumps(message))).encode())


def in_background(work, *arguments):
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def relay(pipe, key, made=str):
    for line in pipe:
        say(**{key: made(line)})


def exchange(answers):
    while True:
        with open("said") as file:
            say(says=file.readline(2000).strip())
        answer = answers.get()
        with open("told", "w") as file:
            json.dump(answer, file)


def obey(controller, answers, ansible):
    """Take what the controller sends until it is gone, which ends Ansible."""
    try:
        for line in controller:
            message = json.loads(line)
            if "told" in message:
                answers.put(message["told"])
                continue
            number, name, size = message["supply"]
            os.mkdir("part")
            with open("part/" + name, "wb") as file:
                while file.tell() < size:
                    file.write(controller.read(min(size - file.tell(), 1 << 20)) or sys.exit())
            os.rename("part", str(number))
    except OSError as error:
        say(log=str(error))
    finally:
        ansible.terminate()


def beat():
    while True:
        time.sleep(ALIVE_S)
        say(alive=True)


def run(controller, folder):
    order = json.loads(controller.readline())
    zipfile.ZipFile(io.BytesIO(controller.read(order["size"]))).extractall()
    for name, text in order["files"].items():
        with open(name, "w") as file:
            file.write(text.replace("@folder@", folder))
    for name in ("said", "told"):
        os.mkfifo(name)
    (events, reports), (wants, requests) = os.pipe(), os.pipe()
    settings = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    settings.update(ANSIBLE_CONFIG=folder + "/ansible.cfg", ANSIBLE_HOME=folder, LC_ALL="C.UTF-8")
    settings.update(PROVISION_FOLDER=folder, PROVISION_EVENTS=str(reports), PROVISION_WANTS=str(requests))
    words = [sys.executable, "-IS", "-c", RUN, folder] + [word.replace("@folder@", folder) for word in order["arguments"]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "pass_fds": (reports, requests)}
    ansible = subprocess.Popen(words, env=settings, cwd=os.path.expanduser("~"), universal_newlines=True, **pipes)
    os.close(reports)
    with ansible.stdin:
        ansible.stdin.write(order["password"] or "")
    answers = queue.Queue()
    in_background(exchange, answers)
    in_background(obey, controller, answers, ansible)
    in_background(relay, open(wants), "want", int)
    relays = [in_background(relay, open(events), "event", json.loads), in_background(relay, ansible.stdout, "log")]
    code = ansible.wait()
    relays[0].join(None if code >= 0 else 5.0)  # where it was killed, what it had at work may hold the pipes
    relays[1].join(5.0)
    return code


def main():
    place = PLACE if os.path.isdir(PLACE) else tempfile.gettempdir()
    folder, code = os.path.join(place, "%s%s-%d" % (PREFIX, os.environ["PROVISION_RUN_ID"], os.getpid())), 1
    in_background(beat)
    remove_abandoned()
    make_locked(folder)
    os.chdir(folder)
    try:
        code = run(sys.stdin.buffer, folder)
    except Exception as error:
        say(log="%s: %s" % (type(error).__name__, error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(code)  # a thread that reads would keep Python from ending


if __name__ == "__main__":
    main()
