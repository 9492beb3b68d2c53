"""Train a small draft from a finished cache, without the target: a minute on two CPU cores.

    python examples/train_from_cache.py demo/cache

The draft sees the target's states after token i and the token that followed, and guesses the
distribution of the one after that. Its loss is the total-variation distance to the target's; one
minus it is the rate at which speculative decoding would accept what the draft proposes. (A few
dozen conversations are learnt by heart; a draft worth serving needs many thousands.)
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dspark.cache import build_cached_dspark_dataloader, read_target_weight_modules, target_logits


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
    """Yield states after i, token i+1, last state after i+1, token i+2, where that counts."""
    for batch in loader:
        where = batch["loss_mask"][:, 2:].bool()
        pick = torch.randperm(int(where.sum()))[:per_batch]
        ids, last = batch["input_ids"], batch["target_last_hidden_states"]
        columns = (batch["target_hidden_states"][:, :-2], ids[:, 1:-1], last[:, 1:-1], ids[:, 2:])
        states, token, last, after = (column[where][pick] for column in columns)
        yield states.float(), token, last.float(), after


def main() -> None:
    """Check what the cache says of the next token, then train and show the acceptance rate."""
    parser = argparse.ArgumentParser(description="Train a small draft from a DSpark cache.")
    parser.add_argument("cache")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    embed, head = read_target_weight_modules(args.cache)
    embed.weight, head.weight = embed.weight.float(), head.weight.float()
    loader = build_cached_dspark_dataloader(cache_dir=args.cache, batch_size=2, shuffle=True)

    tries = supervised(loader, per_batch=96)
    hit = torch.cat([target_logits(head, last).argmax(-1) == after for _, _, last, after in tries])
    print(f"stored head on the stored states: next token right {hit.sum()} of {len(hit)} times")
    assert hit.float().mean() > 0.2, "the states do not belong to these tokens or to this head"

    manifest = loader.dataset.manifest
    draft = Draft(manifest["target_hidden_dim"], manifest["hidden_size"])
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-4)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        losses = []
        for states, token, last, _ in supervised(loader, per_batch=96):
            target = target_logits(head, last).softmax(-1)
            guess = target_logits(head, draft(states, embed.weight[token])).softmax(-1)
            loss = 0.5 * (guess - target).abs().sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        mean = sum(losses) / len(losses)
        print(f"epoch {epoch + 1}: total variation {mean:.3f}, acceptance {1 - mean:.1%}")


if __name__ == "__main__":
    main()
