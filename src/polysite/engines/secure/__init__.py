"""Secure sums: the server learns the sum of the replies of a round and no single reply.

Paper: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017

A site turns its reply into whole numbers modulo 2^64 (``fixed_point.py``) and adds masks, one for every other site and
one of its own (``masks.py``). The masks of two sites for each other cancel in the sum. A site's own mask is removed
when the sum is known, from shares that it dealt to all (``shamir.py``); from shares of its key the masks of a site that
dropped out are removed instead. A site (``member.py``) reveals one of the two for every other site, never both. More
than half of the sites are needed to reveal either, so the server cannot have both by telling sites different stories.

    step      a site is sent                           it answers
    keys      the name of this sum                     two public keys, a digest of the seed of its own mask
    shares    the public keys of all                   for every other site, encrypted: shares of its seed and its key
    members   the encrypted shares that are for it     nothing; it now has the list of sites of this sum
    (train)   the payload of the round                 its masked reply
    reveal    the sites whose masked replies arrived   shares of their seeds, and of the keys of the others

``server.py`` is the server's half. All keys are made anew for every sum. With a few dozen hospitals every pair has a
mask; SecAgg+, which has fewer for thousands of phones, is not needed. Flower's own implementation is not used: it
draws masks from a 32-bit seed by a generator that is not cryptographic (``pseudo_rand_gen``).
"""
