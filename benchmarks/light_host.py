"""A STUB of a host, below the connection: what sshd starts for a login in `light_hosts.py`. Nothing is installed and no Ansible runs.

It answers the survey under its own identity, and the steps with lines as a real host prints them during its first `up`, at such a pace,
exchanging keys and taking files. Its texts were written after those of real hosts, and are no recording. Real are ssh, sshd, and all that
the controller does.
"""

import json
import os
import sys
import threading
import time

MARK = "===PROVISION-ANSWER==="
FOLDER = sys.argv[1]
WORDS = os.environ.get("SSH_ORIGINAL_COMMAND", "")
# 127.0.0.1 is no host: number 1 is 127.0.0.2.
A, B, C = (int(part) for part in os.environ["SSH_CONNECTION"].split()[2].split(".")[1:])
NUMBER = (A << 16 | B << 8 | C) - 1
speaking = threading.Lock()


def own(text):
    """A recorded text with this host's identity in place of the recorded one's."""
    return text.replace("@number@", str(NUMBER)).replace("@address@", f"10.{A}.{B}.{C}").replace("@hex@", f"{NUMBER:016x}")


def read(name):
    with open(os.path.join(FOLDER, name)) as file:
        return file.read()


def say(text):
    with speaking:
        os.write(1, f"\n{MARK} {text}\n".encode())


def beat():
    while True:
        time.sleep(10)
        say('{"alive": true}')


def survey(fault):
    if fault == "python":
        print('===PROVISION-FACTS-BEGIN===\n{"missing_python": true}\n===END===')
        sys.exit(71)
    found = json.loads(own(read("survey.json")))
    found["time"] = {"epoch": time.time()}
    print(f"\n===PROVISION-FACTS-BEGIN===\n{json.dumps(found)}\n===END===")


def steps(fault, pace):
    controller = sys.stdin.buffer
    order = json.loads(controller.readline())
    left = order["size"]
    while left:
        left -= len(controller.read(min(left, 1 << 20))) or sys.exit(1)
    threading.Thread(target=beat, daemon=True).start()
    began, told, waited, parent = time.monotonic(), {}, 0.0, os.getppid()
    for at, text in json.loads(own(read("events.json"))):
        time.sleep(max(0.0, began + waited + at * pace - time.monotonic()))
        stops = time.monotonic()
        if fault == "flood" and at > 5:
            while True:
                say('{"log": "%s"}' % ("x" * 60000))
        if fault == "hang" and at > 5:
            speaking.acquire()
            while os.getppid() == parent:
                time.sleep(1)
            os._exit(1)
        if fault == "fails" and at > 10 and '"runner_on_ok"' in text:
            data = dict(json.loads(text)["event"]["event_data"], res={"failed": True, "msg": "No space left on device"})
            say(json.dumps({"event": {"event": "runner_on_failed", "event_data": data}}))
            os._exit(2)
        say(text)
        if text.startswith('{"says"'):
            told = json.loads(controller.readline())["told"] or told
        elif text.startswith('{"want"'):
            left = json.loads(controller.readline())["supply"][2]
            while left:
                left -= len(controller.read(min(left, 1 << 20))) or sys.exit(1)
        waited += time.monotonic() - stops
    say(json.dumps({"log": f"{sum(map(bool, told.values()))} hosts have a key here"}))
    os._exit(0)


def main():
    faults, pace = json.loads(read("faults.json")), float(read("pace"))
    fault = faults.get(str(NUMBER), "")
    if fault == "slow":
        pace *= 5
    if "PROVISION_SURVEY_OPTIONS" in WORDS:
        survey(fault)
    elif "on_host.py" in WORDS:
        steps(fault, pace)


main()
