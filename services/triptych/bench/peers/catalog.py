"""The peers, by name. To add one, write its file and name it here."""

from triptych.bench.peers.llamacpp import LlamaCpp
from triptych.bench.peers.openvino import OpenVino
from triptych.bench.peers.peer import Peer
from triptych.bench.peers.transformers import Transformers
from triptych.bench.peers.vllm import Vllm

PEERS: dict[str, Peer] = {peer.name: peer for peer in (Vllm(), LlamaCpp(), OpenVino(), Transformers())}
