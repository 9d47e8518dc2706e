"""Shuffled training batches of a dataset, and the row behind one of them.

python examples/load_batches.py PATH
"""

import argparse

import actds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="a sealed dataset")
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()

    dataset = actds.open(args.path)
    hook = next(iter(dataset.hooks))

    # A batch is a tensor of the type that the model computed in; nothing was widened on the way.
    with actds.Loader(dataset, hook, batch=args.batch, seed=0) as loader:
        batch = next(loader)
        print(hook, tuple(batch.shape), batch.dtype, f"{len(loader)} batches in an epoch")
        state = loader.state_dict()
        following = next(loader)

    # The state says where it stood: another process, or another number of them, goes on from it.
    with actds.Loader(dataset, hook, batch=args.batch, seed=0) as loader:
        loader.load_state_dict(state)
        print("goes on with the same rows:", next(loader).equal(following))

    # The served distribution: a row that prefix hits reused m times comes m times more. First
    # positions are left out: one that everybody shares is an attention sink of huge norm.
    with actds.Loader(
        dataset,
        hook,
        batch=args.batch,
        weights="multiplicity",
        exclude="first_position",
        provenance=True,
    ) as loader:
        _, rows = next(loader)
        print("left out:", loader.excluded, "digest:", loader.config["digest"][:16])
        print("first row:", {name: column[0].item() for name, column in rows.items()})


if __name__ == "__main__":
    main()
