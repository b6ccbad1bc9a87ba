"""A request whose numbers went wrong leaves no state behind, and takes nothing from others."""

from tests.serving.small_cache import Server, text


def test_all_on_its_path_goes_and_nothing_else():
    server = Server()
    shared, other = text(1, 1024), text(9, 700)
    server.run(shared + text(2, 300), declared=[512])
    server.run(other)
    reader = server.admit(shared + text(2, 300) + text(3, 200))  # goes on from a state on the path, and from its pages
    wrong = server.admit(shared + text(4, 300))
    assert (reader.hit_tokens, wrong.hit_tokens) == (1280, 512)
    for stop in wrong.stops:
        server.publish(wrong, stop)
    server.cache.distrust(wrong, now=server.now)
    server.cache.check()
    assert server.hit(shared + text(4, 300)) == 0 and server.hit(other) == 640
    assert server.hit(shared + text(2, 300)) == 1280, "a state that it has never seen"
    server.release(wrong)
    server.release(reader)
    assert server.run(shared + text(4, 300)) == 0
    assert server.hit(shared + text(4, 300)) == 1280


def test_a_pinned_state_stays_for_those_who_read_it():
    server = Server(pin_bytes=1_000_000)
    prompt = text(1, 1000)
    server.run(prompt)
    assert server.cache.pin(server.keys(prompt)[6], ttl=100.0, now=server.now)
    admission = server.admit(prompt)
    server.cache.restored(admission, now=server.now)
    server.cache.distrust(admission, now=server.now)
    server.release(admission)
    assert server.hit(prompt) == 896
    server.cache.unpin(server.keys(prompt)[6], now=server.now)
    server.cache.distrust(server.admit(prompt), now=server.now)
    assert server.hit(prompt) == 896, "it is being restored"
