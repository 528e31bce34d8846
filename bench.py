"""
The same load on several configurations of one instance: which is faster, and by how much.

    pyinfra inventory/prod.py bench.py --dry ...           show what is compared
    pyinfra inventory/prod.py bench.py \\
        --data instance=gpu-01/air-a --data configurations=air.yml

The file names a load and, for each configuration, what differs from group_vars:

    load: {input: 1024~256, output: 256, streams: 32}
    configurations:
      as it is: {}
      cache in FP8: {vllm_args: {kv-cache-dtype: fp8}}
      two cards: {cards: [0, 1]}

The instance is taken out of its pool, started with each of them the normal way, measured through
the SSH connection, and put back as it was. Refused on the last ready instance of a pool. Further
`--data`: `out=DIR` for the files, `generator=PROGRAM` for guidellm.
"""

from vllm_fleet import deploys

deploys.bench()
