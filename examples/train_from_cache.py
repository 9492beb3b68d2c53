"""Train a small draft from a finished cache, without the target: a minute on two CPU cores.

    python examples/train_from_cache.py demo/cache

The draft sees the target's states after token i and the token that followed, and guesses the
distribution of the one after that, which the target would need another forward for. Its loss is
the total-variation distance to the target's distribution; one minus it is the rate at which
speculative decoding would accept what the draft proposes. (A few dozen conversations are learnt by
heart; a draft worth serving needs a cache of many thousands.)
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dspark.cache import build_cached_dspark_dataloader, read_target_weight_modules


class Draft(nn.Module):
    """States of a few layers and an embedded token -> the final hidden state one token later."""

    def __init__(self, context: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(context), nn.LayerNorm(hidden)])
        self.mix = nn.Sequential(nn.Linear(context + hidden, 1024), nn.GELU())
        self.out = nn.Linear(1024, hidden)

    def forward(self, states: Tensor, token: Tensor) -> Tensor:
        """Map states [N, L·H] and embeddings [N, H] to hidden states [N, H]."""
        return self.out(self.mix(torch.cat([self.norms[0](states), self.norms[1](token)], -1)))


def supervised(loader, per_batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield the states after i, token i+1, the last state after i+1, and token i+2."""
    for batch in loader:
        where = batch["loss_mask"][:, 2:].bool()
        pick = torch.randperm(int(where.sum()))[:per_batch]
        ids, last = batch["input_ids"], batch["target_last_hidden_states"]
        columns = (batch["target_hidden_states"][:, :-2], ids[:, 1:-1], last[:, 1:-1], ids[:, 2:])
        yield tuple(column[where][pick] for column in columns)


def main() -> None:
    """Check what the cache says of the next token, then train and show the acceptance rate."""
    parser = argparse.ArgumentParser(description="Train a small draft from a DSpark cache.")
    parser.add_argument("cache")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    embed, head = (m.weight.float() for m in read_target_weight_modules(args.cache))
    loader = build_cached_dspark_dataloader(cache_dir=args.cache, batch_size=2, shuffle=True)

    hits, seen = 0, 0
    for _, _, last, after in supervised(loader, per_batch=96):
        hits += int((last.float() @ head.T).argmax(-1).eq(after).sum())
        seen += len(after)
    print(f"stored head on the stored states: next token right {hits} of {seen} times")
    assert hits > 0.2 * seen, "the states do not belong to these tokens or to this head"

    manifest = loader.dataset.manifest
    draft = Draft(manifest["target_hidden_dim"], manifest["hidden_size"])
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-4)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        losses = []
        for states, token, last, _ in supervised(loader, per_batch=96):
            target = (last.float() @ head.T).softmax(-1)
            guess = (draft(states.float(), embed[token]) @ head.T).softmax(-1)
            loss = 0.5 * (guess - target).abs().sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        mean = sum(losses) / len(losses)
        print(f"epoch {epoch + 1}: total variation {mean:.3f}, acceptance {1 - mean:.1%}")


if __name__ == "__main__":
    main()
