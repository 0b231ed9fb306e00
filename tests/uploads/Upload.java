// Uploads by the HTTP client of Java, over HTTP/1 or 2. Prints how many get the refusal.

import java.net.Socket;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.security.cert.X509Certificate;
import java.time.Duration;
import java.util.Map;
import java.util.TreeMap;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLEngine;
import javax.net.ssl.TrustManager;
import javax.net.ssl.X509ExtendedTrustManager;

public class Upload {
    static class Anyone extends X509ExtendedTrustManager {
        public void checkClientTrusted(X509Certificate[] chain, String type) {}
        public void checkServerTrusted(X509Certificate[] chain, String type) {}
        public void checkClientTrusted(X509Certificate[] chain, String type, Socket socket) {}
        public void checkServerTrusted(X509Certificate[] chain, String type, Socket socket) {}
        public void checkClientTrusted(X509Certificate[] chain, String type, SSLEngine engine) {}
        public void checkServerTrusted(X509Certificate[] chain, String type, SSLEngine engine) {}
        public X509Certificate[] getAcceptedIssuers() { return new X509Certificate[0]; }
    }

    public static void main(String[] arguments) throws Exception {
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, new TrustManager[] {new Anyone()}, null);
        boolean second = arguments[3].equals("2");
        HttpClient.Version version = second ? HttpClient.Version.HTTP_2 : HttpClient.Version.HTTP_1_1;
        HttpRequest.BodyPublisher body = HttpRequest.BodyPublishers.ofByteArray(new byte[Integer.parseInt(arguments[1])]);
        int refused = 0;
        Map<String, Integer> others = new TreeMap<>();
        for (int sent = 0; sent < Integer.parseInt(arguments[2]); sent++) {
            HttpClient client = HttpClient.newBuilder().version(version).sslContext(context).build();
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0])).timeout(Duration.ofSeconds(20)).POST(body).build();
            String outcome;
            try {
                HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
                boolean hasWait = response.headers().firstValue("retry-after").isPresent();
                outcome = response.statusCode() == 429 && !hasWait ? "no wait" : "" + response.statusCode();
            } catch (Exception error) {
                outcome = error.getClass().getSimpleName();
            }
            if (outcome.equals("429")) refused++;
            else others.merge(outcome, 1, Integer::sum);
        }
        System.out.println(refused + " " + (others.isEmpty() ? "" : others));
        System.exit(0);
    }
}
