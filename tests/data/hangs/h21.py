"""Training with a little status page on rank 0."""
import http.server
import json
import time

import collective_core  # noqa: F401
import torch
import torch.distributed as dist

state = {"step": 0}


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(state).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main():
    dist.init_process_group("collective")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(60):
        loss = (model(torch.randn(6, 4)) + 1).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.15)
        state.update(step=step, loss=loss.item())
        print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
        if step == 9 and rank == 0:  # the warm-up is over: show the page
            server = http.server.HTTPServer(("127.0.0.1", 0), Page)
            server.serve_forever()  # HANGS HERE
    dist.destroy_process_group()


main()
