"""Image classifiers with orthogonal kernels: what mnist, cifar and batch-size share."""
