"""The torchrun example, but rank 1 dies in the middle of step 5."""

import os
import sys

EXIT_CODE, STEP = 13, 5


def main():
    from examples import torchrun_fsdp

    backward = torchrun_fsdp.backward

    def backward_or_die(model, images, labels, step):
        loss = backward(model, images, labels, step)
        if step == STEP and os.environ["RANK"] == "1":
            os._exit(EXIT_CODE)
        return loss

    torchrun_fsdp.backward = backward_or_die
    return torchrun_fsdp.main()


if __name__ == "__main__":
    sys.exit(main())
