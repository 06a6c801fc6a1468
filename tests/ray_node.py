"""One node of a Ray cluster, until its standard input ends: `ray_node.py OWN_ADDRESS HEAD_ADDRESS PORT FOLDER HAS`, the
last one what it has, as JSON: `RayParams`' arguments, and `runtime_envs`.
Without Ray's dashboard, and without the two agents that a raylet starts with it and waits for: Ray's services, runtime
environments aside, do without, and on a busy machine the raylet gives up before they have come. With `runtime_envs` it
has the agent for those."""
import json, re, sys
from pathlib import Path


WAITS = f"sh {Path(__file__).with_name('ray_agent.sh')}"
PORTS = dict(dashboard_agent=['metrics_agent', 'metrics_export', 'dashboard_agent_listen'],
             runtime_env_agent=['runtime_env_agent'])


def without_agents(start, names):
    "`services.start_ray_process` that gives the raylet agents which only wait, and the ports for which it waits"
    def start_ray_process(command, process_type, *args, **kwargs):
        if process_type == 'raylet':
            command = [re.sub(f'^--({"|".join(names)})_command=.*', rf'--\1_command={WAITS}', o) for o in command]
            said = dict(re.findall(r'--([a-z_-]+)=(\S+)', ' '.join(command)))
            for o in [o for name in names for o in PORTS[name]]:
                Path(said['session_dir'], f'{o}_port_{said["node_id"]}').write_text('-1')
        return start(command, process_type, *args, **kwargs)
    return start_ray_process


def main(own, head, port, folder, has):
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    has = dict(num_cpus=2, num_gpus=0) | json.loads(has)
    real = ['runtime_env_agent'] if has.pop('runtime_envs', False) else []
    services.start_ray_process = without_agents(services.start_ray_process, [o for o in PORTS if o not in real])
    Node.start_api_server = lambda *_, **__: None
    params = RayParams(node_ip_address=own, object_store_memory=100_000_000, temp_dir=folder, include_log_monitor=False,
                       no_monitor=True, include_dashboard=False, **has)
    if own == head: params.gcs_server_port = int(port)
    else: params.gcs_address = f'{head}:{port}'
    node = Node(params, head=own == head, shutdown_at_exit=True, spawn_reaper=False)
    print('ready', flush=True)
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == '__main__': main(*sys.argv[1:])
