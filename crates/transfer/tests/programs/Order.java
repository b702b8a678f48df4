import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.ClosedChannelException;
import java.nio.channels.FileChannel;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.SocketChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;

/** Sends a file with FileChannel.transferTo, in order with other writes: `Order PORT FILE`. programs.rs knows the bytes that come out. */
public class Order {
    public static void main(String[] arguments) throws Exception {
        var address = new InetSocketAddress("127.0.0.1", Integer.parseInt(arguments[0]));
        var file = FileChannel.open(Path.of(arguments[1]), StandardOpenOption.READ);
        blocking(SocketChannel.open(address), file);
        withSelector(SocketChannel.open(address), file);
        closedMeanwhile(SocketChannel.open(address), file);
    }

    static void write(SocketChannel channel, String text) throws IOException {
        var bytes = ByteBuffer.wrap(text.getBytes());
        while (bytes.hasRemaining()) channel.write(bytes);
    }

    static void blocking(SocketChannel channel, FileChannel file) throws IOException {
        write(channel, "blocking");
        for (long at = 0; at < file.size();) at += file.transferTo(at, file.size() - at, channel);
        write(channel, "between");
        file.transferTo(11, 1000, channel);
        for (long at = 7; at < 1_000_007;) at += file.transferTo(at, 1_000_007 - at, channel);
        channel.close();
    }

    static void withSelector(SocketChannel channel, FileChannel file) throws IOException {
        write(channel, "selector");
        channel.configureBlocking(false);
        var selector = Selector.open();
        channel.register(selector, SelectionKey.OP_WRITE);
        for (long at = 0; at < file.size();) {
            selector.select();
            selector.selectedKeys().clear();
            at += file.transferTo(at, file.size() - at, channel);
        }
        selector.close();
        channel.configureBlocking(true);
        write(channel, "end");
        channel.close();
    }

    /** The peer reads nothing until the file is closed, so the thread waits in transferTo: a signal ends its call. */
    static void closedMeanwhile(SocketChannel channel, FileChannel file) throws Exception {
        write(channel, "closed");
        var result = new Throwable[1];
        var sender = new Thread(() -> {
            try {
                for (;;) file.transferTo(0, file.size(), channel);
            } catch (Throwable thrown) {
                result[0] = thrown;
            }
        });
        sender.start();
        // Until the thread is in the call for long.
        Thread.sleep(300);
        file.close();
        sender.join();
        channel.close();
        // The call that was interrupted may have returned a count: then the next one fails.
        if (!(result[0] instanceof ClosedChannelException)) throw new AssertionError(result[0]);
        System.out.println("closed");
    }
}
